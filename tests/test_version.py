# SPDX-License-Identifier: Apache-2.0
"""The version is in one place; what is deprecated warns at the user's line."""

from __future__ import annotations

import importlib.metadata
import pathlib
import re

import pytest
import tensorflow as tf

import replicator

_ROOT = pathlib.Path(replicator.__file__).parent


@pytest.mark.parametrize("what", ["function", "create_distributed_session"])
def test_a_declared_loss_is_deprecated_at_the_users_line(what: str) -> None:
    autodist = replicator.AutoDist(["CPU:0", "CPU:1"])
    calls = {
        "function": lambda: autodist.function(loss="mean"),
        "create_distributed_session": lambda: autodist.create_distributed_session(
            loss="mean"
        ),
    }
    with (
        tf.Graph().as_default(),
        autodist.scope(),
        pytest.warns(DeprecationWarning, match=f"loss= of AutoDist.{what}") as caught,
    ):
        tf.Variable(1.0)
        calls[what]()
    assert caught[0].filename == __file__
    # It goes when it was announced to go.
    (removed,) = re.findall(r"removed in (\d+)\.(\d+)\.", str(caught[0].message))
    version = replicator.__version__.split(".")[:2]
    assert tuple(map(int, version)) < tuple(map(int, removed))


def test_the_version_is_in_one_place() -> None:
    text = (_ROOT / "version.py").read_text()
    assert f'__version__ = "{replicator.__version__}"' in text
    settings = (_ROOT.parent / "setup.cfg").read_text()
    assert "version = attr: replicator.version.__version__" in settings
    try:
        installed = importlib.metadata.version("replicator")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("replicator is not installed")
    assert installed == replicator.__version__
