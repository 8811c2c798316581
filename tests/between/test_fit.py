"""Keras' fit in between-graph mode comes to plain Keras' numbers, on all hosts."""

from __future__ import annotations

import pathlib
import pickle

import numpy as np
import pytest
import tensorflow as tf

from tests.between import processes
from tests.keras import test_programs, worlds


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [("vae", "tabular"), tuple(p.__name__ for p in test_programs.PROGRAMS)],
    ids=["two", "all"],
)
def test_programs_of_keras(tmp_path: pathlib.Path, names: tuple[str, ...]) -> None:
    processes.run("fits", [1, 2], str(tmp_path), *names)
    found = [pickle.loads((tmp_path / str(host)).read_bytes()) for host in (0, 1)]
    for name in names:
        wanted = worlds.outcome(getattr(test_programs, name), 0)
        for own in found:
            tf.nest.map_structure(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
                tuple(own[name]),
                wanted,
            )
