# SPDX-License-Identifier: Apache-2.0
"""BackupAndRestore is refused in all processes; all other callbacks are passed on."""

from __future__ import annotations

import gc
import pathlib
import weakref
from typing import Any

import keras
import pytest

import replicator
from replicator.keras import files
from tests.cluster import as_threads


class Model:
    """Has the fit of a Keras model, which tells what it was given."""

    def fit(self, x: Any = None, callbacks: Any = None, epochs: int = 1) -> Any:
        return x, callbacks, epochs


def _fitted(monkeypatch: pytest.MonkeyPatch, *given: Any, **named: Any) -> list[Any]:
    """Returns what fit returns, or raises, in each of two processes."""
    as_threads.fake_store(monkeypatch)

    def fit(peers: Any) -> Any:
        model = Model()
        files.refuse_backups(model, peers)
        return model.fit(*given, **named)

    return as_threads.together(fit, fit)


def test_all_else_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    other = keras.callbacks.History()
    for callbacks in (None, other, [other], keras.callbacks.CallbackList([other])):
        expected = (1, callbacks, 3)
        actual = _fitted(monkeypatch, 1, callbacks=callbacks, epochs=3)
        assert actual == [expected, expected]


def test_backups_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    backup = keras.callbacks.BackupAndRestore(str(tmp_path))
    own = type("Own", (keras.callbacks.BackupAndRestore,), {})(str(tmp_path))
    several = [keras.callbacks.History(), own]
    for callbacks in (backup, [backup], several, keras.callbacks.CallbackList(several)):
        named = _fitted(monkeypatch, callbacks=callbacks)
        for error in (*named, *_fitted(monkeypatch, None, callbacks)):
            assert isinstance(error, replicator.ContextError)
            assert pathlib.Path(__file__).name in str(error)
            assert "save `cluster.checkpoint(" in str(error)


def test_a_wrong_call_raises_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="no_such"):
        model = Model()
        files.refuse_backups(model, as_threads.two_peers()[0])
        model.fit(no_such=1)


def test_a_model_is_freed() -> None:
    model = Model()
    files.refuse_backups(model, as_threads.two_peers()[0])
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
