# SPDX-License-Identifier: Apache-2.0
"""The exchange of objects between processes, with a fake of TensorFlow's store."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import random
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator.cluster import clashes, faults, peers, waiting
from tests.cluster import as_threads
from tests.cluster.as_threads import together


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    return as_threads.fake_store(monkeypatch)


def test_all_hear_what_all_say() -> None:
    objects = [{"x": [1, "ä"]}, None]
    heard = together(*(lambda p, s=s: p.exchange("builds f", s) for s in objects))
    assert heard == [objects, objects]


def test_long_texts_come_in_parts(store: dict[str, str]) -> None:
    text = random.Random(0).randbytes(1_500_000).hex()
    heard = together(*(lambda p: p.exchange("says", text),) * 2)
    assert heard == [[text, text]] * 2
    assert len(store) > 2 and max(map(len, store.values())) < 1_100_000


def test_those_who_do_something_else_are_named_in_all_processes() -> None:
    actual = together(
        lambda p: p.exchange("builds f", 1, "train.py:3"),
        lambda p: p.exchange("builds g", 1, "train.py:4"),
    )
    for error in actual:
        assert isinstance(error, replicator.MismatchError)
        for part in ("host 0 (a:1): builds f at train.py:3", "host 1 (b:2): builds g"):
            assert part in str(error)


def test_a_process_that_fails_is_named_by_those_that_wait() -> None:
    def fails(p: peers.Peers) -> None:
        with p.telling():
            raise replicator.InputError("no such file\nFix: make one.")

    actual = together(lambda p: p.exchange("builds f", 1), fails)
    assert isinstance(actual[0], replicator.MismatchError)
    assert "host 1 (b:2) failed where the others continue" in str(actual[0])
    assert "InputError: no such file\n" in str(actual[0])


def test_how_long_the_slowest_is_waited_for_can_be_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert waiting.patience() == 600
    monkeypatch.setattr(faults, "check", lambda: None)
    monkeypatch.setenv("REPLICATOR_PATIENCE", "0.1")
    actual = together(lambda p: p.exchange("builds f", 1, "train.py:3"), lambda p: None)
    assert isinstance(actual[0], replicator.MismatchError)
    message = "host 1 (b:2) did not reach builds f at train.py:3 within 0.1 s"
    assert message in str(actual[0])
    assert "REPLICATOR_PATIENCE" in str(actual[0])
    monkeypatch.setenv("REPLICATOR_PATIENCE", "long")
    with pytest.raises(replicator.ArgumentError, match="PATIENCE='long' is not a num"):
        waiting.patience()


def test_after_an_error_all_go_on_together() -> None:
    """One fails, and the other is notified; their next calls pair."""

    def does(p: peers.Peers, fails: bool) -> Any:
        with contextlib.suppress(replicator.ReplicatorError), p.telling():
            if fails:
                raise replicator.InputError("no such file")
            p.exchange("builds f", 1)
        with contextlib.suppress(replicator.MismatchError), p.telling(), p.telling():
            p.exchange("builds g" if fails else "builds h", 1)
        return p.exchange("builds f", p.process)

    heard = together(lambda p: does(p, False), lambda p: does(p, True))
    assert heard == [[0, 1]] * 2


@pytest.mark.parametrize(
    ("one", "other", "parts"),
    [
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, ("b=2", "b=3")),
        ([["v", 1], ["w", 1]], [["v", 1], ["w", 2]], ("w, 1", "w, 2")),
        ([1], [1, 2], ("1 of them", "2 of them")),
        ("x", "y", ("'x'", "'y'")),
    ],
)
def test_the_first_difference_is_shown(one: Any, other: Any, parts: Any) -> None:
    actual = together(
        lambda p: p.check_equal("makes a thing", one, "make one."),
        lambda p: p.check_equal("makes a thing", other, "make one."),
    )
    for error in actual:
        text = str(error)
        assert "every host makes a thing, and they differ" in text
        assert f"host 0 (a:1): {parts[0]}" in text
        assert f"host 1 (b:2): {parts[1]}" in text
        assert "Fix: make one." in text


def test_keys_of_two_replicators_never_meet() -> None:
    one, two = peers.Keys(0), peers.Keys(1)
    taken = {one.take(one.next, 5) + k for k in range(5)}
    taken |= {one.take(one.next, 3) + k for k in range(3)}
    assert len(taken) == 8
    assert not taken & {two.take(two.next, 9) + k for k in range(9)}
    groups = [(0, 1), (0, 2), (0, 1)]
    assert [one.group(g) for g in groups][0::2] == [one.group((0, 1))] * 2
    assert len({keys.group(g) for keys in (one, two) for g in groups}) == 4


def test_keys_come_to_an_end() -> None:
    with pytest.raises(replicator.ClusterError, match="256th Replicator.*most 255"):
        peers.Keys(256)
    keys = peers.Keys(255)
    assert keys.take(0, 1 << 23) + (1 << 23) <= 1 << 31
    with pytest.raises(replicator.ClusterError, match="communicate too often"):
        keys.take(keys.next, 1)


def test_checkpoints_do_not_use_up_the_numbers_of_replicators(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, doing = peers.ProcessGroup(0, ("a:1",)), clashes.ActivityMonitor(0, [])
    monkeypatch.setattr(clashes, "monitor", lambda own, names: doing)
    monkeypatch.setattr(peers, "_numbers", itertools.count())
    before = peers.Peers(known)
    monkeypatch.setattr(peers, "process_group", lambda: known)
    v = tf.Variable(1.0)
    made = [replicator.Checkpoint(tmp_path, {"v": v}) for _ in range(260)]
    made[-1].save()
    assert len({checkpoint._peers.number for checkpoint in made}) == 260
    after = peers.Peers(known)
    assert after.number == before.number + 1
    keys = {p.keys.take(p.keys.next, 1) for p in (before, after, made[0]._peers)}
    assert len(keys) == 3


def test_a_process_that_is_alone_has_no_peers() -> None:
    assert peers.process_group() is None
