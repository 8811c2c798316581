"""Splits the CPU into eight logical devices before anything of TensorFlow runs.

Helpers that several test files share are in tests/helpers.py.

`--with variables=sharded --with fusion=False` runs the tests with other defaults of
Replicator: what it computes does not depend on them.
"""

import ast
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest
import tensorflow as tf

import replicator
import replicator.errors

NUM_CPUS = 8

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * NUM_CPUS,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option --with."""
    parser.addoption(
        "--with",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another default for an option of Replicator, e.g. variables=sharded",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Gives Replicator the defaults that --with asks for."""
    defaults = replicator.Replicator.__init__.__kwdefaults__
    for assignment in config.getoption("--with"):
        name, _, value = assignment.partition("=")
        if name not in defaults:
            raise pytest.UsageError(f"--with {name}: have {', '.join(defaults)}")
        literal = value in ("True", "False", "None")
        defaults[name] = ast.literal_eval(value) if literal else value


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Under --with variables=..., leaves out what is about mirrored variables."""
    chosen = replicator.Replicator.__init__.__kwdefaults__["variables"]
    if chosen != "mirrored" and item.get_closest_marker("mirrored"):
        pytest.skip("counts or compares the components of mirrored variables")


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """Under --with, skips a test that does what the chosen option refuses by name.

    Replicas cannot be copies where a step asks who it is, and a variable with one owner
    cannot be written in every way; tests/graph/test_clone.py and test_owners.py are
    about these errors.
    """
    outcome = yield
    error = outcome.excinfo and outcome.excinfo[1]
    options = pyfuncitem.config.getoption("--with")
    uncloned = isinstance(error, replicator.errors.CloneError)
    unshared = isinstance(error, replicator.errors.UnsupportedError) and (
        'variables="mirrored"' in str(error)
    )
    if ("build=clone" in options and uncloned) or (
        "variables=sharded" in options and unshared
    ):
        reason = str(error).partition("\n")[0]
        outcome.force_exception(pytest.skip.Exception(f"refused: {reason}"))
