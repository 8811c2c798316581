# SPDX-License-Identifier: Apache-2.0
"""Files that a model writes are complete; backups of several processes are refused."""

from __future__ import annotations

import gc
import pathlib
import weakref
from typing import Any

import keras
import numpy as np
import pytest

import replicator
from replicator.keras import files
from tests import helpers
from tests.cluster import as_threads


@keras.saving.register_keras_serializable()
class _Fragile(keras.layers.Dense):
    """A layer that cannot be saved while it is broken."""

    broken = False

    def save_own_variables(self, store: Any) -> None:
        if self.broken:
            raise ConnectionError("a host is lost")
        super().save_own_variables(store)


def _model() -> Any:
    repl = helpers.make(2)
    with repl.context():
        inputs = [keras.Input([2]), keras.layers.Dense(2), _Fragile(1)]
        model = keras.Sequential(inputs)
        model.compile("adam", "mse")
    return repl.keras_model(model)


_FILES = [("save_weights", "a.weights.h5"), ("save", "a.keras")]


@pytest.mark.parametrize(("method", "name"), _FILES)
def test_the_old_one_stays_until_the_new_one_is_whole(
    method: str, name: str, tmp_path: pathlib.Path
) -> None:
    model = _model()
    path = tmp_path / name
    getattr(model, method)(path)
    path.chmod(0o640)
    before = model.get_weights()
    model.set_weights([value + 1 for value in before])
    model.layers[1].broken = True
    with pytest.raises(ConnectionError):
        getattr(model, method)(str(path))
    assert [one.name for one in tmp_path.iterdir()] == [name]
    _expect(path, before)
    model.layers[1].broken = False
    getattr(model, method)(path)
    _expect(path, model.get_weights())
    assert path.stat().st_mode & 0o777 == 0o640


def _expect(path: pathlib.Path, weights: list[np.ndarray]) -> None:
    """Asserts that a file holds these weights."""
    if path.suffix == ".keras":
        loaded = keras.saving.load_model(path)
    else:
        loaded = _model()
        loaded.load_weights(path)
    for own, expected in zip(loaded.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(own, expected)


@pytest.mark.parametrize(("method", "name"), _FILES)
def test_a_link_stays_one(method: str, name: str, tmp_path: pathlib.Path) -> None:
    model = _model()
    (tmp_path / "elsewhere").mkdir()
    place = tmp_path / "elsewhere" / name
    (tmp_path / name).symlink_to(place)
    getattr(model, method)(tmp_path / name)
    assert (tmp_path / name).is_symlink()
    _expect(place, model.get_weights())


def test_what_else_keras_writes_is_its_own_matter(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model()
    with pytest.raises(ValueError, match=r"must end in `\.weights\.h5`"):
        model.save_weights(tmp_path / "a.txt")
    with pytest.raises(OSError, match="missing"):
        model.save_weights(tmp_path / "missing" / "a.weights.h5")
    model.save_weights(tmp_path / "parts.weights.json", max_shard_size=1)
    assert (tmp_path / "parts.weights.json").exists()
    model.save(tmp_path / "folder", zipped=False)
    assert (tmp_path / "folder" / "config.json").exists()
    model.save(tmp_path / "old.h5")
    before = (tmp_path / "old.h5").read_bytes()
    monkeypatch.setattr("builtins.input", lambda *_: "n")  # Keras asks
    model.save(tmp_path / "old.h5", overwrite=False)
    assert (tmp_path / "old.h5").read_bytes() == before


def test_a_class_keeps_its_own_methods(tmp_path: pathlib.Path) -> None:
    class Own(keras.Sequential):
        def save_weights(self, filepath: Any, overwrite: bool = True) -> str:
            super().save_weights(filepath, overwrite)
            return "saved"

    repl = helpers.make(2)
    with repl.context():
        model = Own([keras.Input([2]), keras.layers.Dense(2)])
    assert repl.keras_model(model).save_weights(tmp_path / "a.weights.h5") == "saved"
    assert (tmp_path / "a.weights.h5").exists()


# --- BackupAndRestore in several processes --------------------------------------------


class Stub:
    """Has the fit of a Keras model, which tells what it was given."""

    def fit(self, x: Any = None, callbacks: Any = None, epochs: int = 1) -> Any:
        return x, callbacks, epochs


def _fitted(monkeypatch: pytest.MonkeyPatch, *given: Any, **named: Any) -> list[Any]:
    """Returns what fit returns, or raises, in each of two processes."""
    as_threads.fake_store(monkeypatch)

    def fit(peers: Any) -> Any:
        model = Stub()
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
        model = Stub()
        files.refuse_backups(model, as_threads.two_peers()[0])
        model.fit(no_such=1)


def test_a_model_is_freed() -> None:
    model = Stub()
    files.refuse_backups(model, as_threads.two_peers()[0])
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
