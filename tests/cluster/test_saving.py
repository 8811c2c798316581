# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint that the first process sends to the others."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest
import tensorflow as tf

from replicator.cluster import saving
from tests.cluster import as_threads


class _Peers:
    """Records what the first process sends, and repeats it to the second."""

    def __init__(
        self, process: int, sent: list[Any], latest: str | None = None
    ) -> None:
        self.process, self._sent, self._latest = process, sent, latest

    def exchange(self, what: str, said: Any) -> list[Any]:
        if what == "looks for a checkpoint" and self._latest is not None:
            return [self._latest, None]
        return [self.broadcast(said), None]

    def broadcast(self, words: Any) -> Any:
        if self.process == 0:
            self._sent.append(words)
            return words
        return self._sent.pop(0)


def _together(peers: Any, v: tf.Variable, folder: pathlib.Path) -> saving.Files:
    options = tf.train.CheckpointOptions()
    return saving.files(peers, tf.train.Checkpoint(v=v), str(folder), 3, options)


@pytest.mark.parametrize("number", [1, 12])
def test_names_of_files_are_not_sent(number: int, tmp_path: pathlib.Path) -> None:
    """Whatever the first process says its path is, the others write where they want."""
    first, v = tmp_path / "first", tf.Variable(tf.range(1000.0))
    saving.LocalFiles(
        tf.train.Checkpoint(v=v), str(first), 3, tf.train.CheckpointOptions()
    ).save(number)
    (first / f"ckpt-{number}.note").touch()  # some other file
    sent: list[Any] = []
    _together(_Peers(0, sent), v, first).restore()
    assert sent[0] == str(first / f"ckpt-{number}")
    assert sent[1] == [
        os.stat(f"{sent[0]}.{name}").st_size
        for name in ("index", "data-00000-of-00001")
    ]
    assert not any(isinstance(said, str) for said in sent[1:])
    there = tf.Variable(tf.zeros([1000]))
    before = set(tmp_path.rglob("*"))
    outside = str(tmp_path / "first" / ".." / "..")
    second = _together(_Peers(1, sent[1:], outside), there, tmp_path / "second")
    second.restore()
    tf.debugging.assert_equal(there, v)
    assert set(tmp_path.rglob("*")) == before
    assert second.latest == outside


def test_all_stop_after_the_step_at_which_one_is_told_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_threads.fake_store(monkeypatch)

    def stops(own: Any) -> bool:
        return saving.StopAgreement(own, 0).stops(1, is_signalled=own.process == 1)

    assert as_threads.together(stops, stops) == [True, True]
