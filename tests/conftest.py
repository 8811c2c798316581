# SPDX-License-Identifier: Apache-2.0
"""Splits the CPU into eight logical devices before TensorFlow is initialized.

Helpers that several test files share are in tests/helpers.py.

`--with variables=sharded --with fusion=False` runs the tests with other defaults of
Replicator, since options do not change what it computes. `--v1` runs them as programs
that disable TensorFlow 2's behavior, `--sample 50:seed` runs 50 random tests, each with
random options. tests/refused.txt lists the tests that an option refuses. `--hosts` runs
them on devices of other processes (on_hosts.py), `--gpus` on GPUs (gpus.py).
"""

import ast
import contextlib
import itertools
import os
import signal
import zlib
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest
import sonnet as snt
import tensorflow as tf

import replicator
from replicator._tf import choice
from tests import gpus, helpers, on_hosts, refusals, repeatable, sampling

NUM_CPUS = 8
_NOTE = "refused"  # the property of a test's report that --note-refused collects
_STEPS = "steps_per_call"  # not an option of Replicator, but how tests run steps

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * NUM_CPUS,
)
repeatable.load()
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell's job in the background ignores it, and so would programs that tests start
    # and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds our options."""
    parser.addoption(
        "--with",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another default for an option of Replicator, e.g. variables=sharded",
    )
    parser.addoption(
        "--v1",
        action="store_true",
        help="as programs of TensorFlow 1: after tf.compat.v1.disable_v2_behavior()",
    )
    parser.addoption(
        "--sample",
        metavar="COUNT[:SEED]",
        help="only so many quick tests, each with random options of Replicator; "
        "the seed is the date unless it is given",
    )
    parser.addoption(
        "--part",
        metavar="K/N",
        default="0/1",
        help="only each n-th test, e.g. 3/10; the parts 0/10 to 9/10 are all tests",
    )
    parser.addoption(
        "--hosts",
        action="store_true",
        help="on devices of two servers, which are processes of their own",
    )
    parser.addoption(
        "--gpus",
        action="store_true",
        help="on logical GPUs, for `make gpu-check`",
    )
    parser.addoption(
        "--faults",
        type=int,
        default=1,
        metavar="COUNT",
        help="how often each fault of the tests of faults happens",
    )
    parser.addoption(
        "--note-refused",
        action="store_true",
        help="list in tests/refused.txt which of the tests the option refuses",
    )


_OPTIONS = pytest.StashKey[list[str]]()  # a test's options, "NAME=VALUE"
_REFUSED = pytest.StashKey[refusals.Refused]()
_SERVERS = pytest.StashKey[contextlib.ExitStack]()  # closed at the end of the session


def pytest_configure(config: pytest.Config) -> None:
    """Prepares the process for the first test."""
    if config.getoption("--gpus"):
        gpus.split(NUM_CPUS)
    if config.getoption("--v1"):
        tf.compat.v1.disable_v2_behavior()
        tf.compat.v1.enable_eager_execution()  # for comparisons with sessions
    snt.Linear(1)  # asks once whether TensorFlow 2 runs: here, eagerly, it does
    for assignment in config.getoption("--with"):
        _value(assignment)
    config.stash[_REFUSED] = refusals.Refused.read()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Connects to the servers, in a process that runs tests."""
    config = session.config
    config.stash[_SERVERS] = contextlib.ExitStack()
    runs_none = getattr(config.option, "numprocesses", None)  # its workers do
    if config.getoption("--hosts") and not runs_none:
        config.stash[_SERVERS].enter_context(on_hosts.connected(NUM_CPUS))


def pytest_report_header(config: pytest.Config) -> str:
    """Reports which sample runs."""
    sample = config.getoption("--sample")
    return f"sample: --sample {sampling.seeded(sample)}" if sample else ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Selects a sample of the tests, and assigns each its options."""
    for item in sampling.left_to_long_runs(items):
        item.add_marker(pytest.mark.slow)
    if config.getoption("--hosts"):
        on_hosts.mark(items)
    if config.getoption("--gpus"):
        gpus.mark(items)
    chosen = config.getoption("--with")
    sample = config.getoption("--sample")
    part = sampling.part(config.getoption("--part"), items)
    part = sampling.concerned(part) if chosen else part
    options = sampling.draw(sample, part) if sample else {item: [] for item in part}
    for item, more in options.items():
        item.stash[_OPTIONS] = [*chosen, *more]
    left_out = [item for item in items if item not in options]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = list(options)


def _value(assignment: str) -> tuple[str, Any]:
    """Parses an assignment."""
    name, _, value = assignment.partition("=")
    if name not in (names := [*replicator.Replicator.__init__.__kwdefaults__, _STEPS]):
        raise pytest.UsageError(f"--with {name}: have {', '.join(names)}")
    literal = value in ("True", "False", "None")
    return name, ast.literal_eval(value) if literal else value


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Sets a test's default options while it runs, with its fixtures."""
    defaults = replicator.Replicator.__init__.__kwdefaults__
    before = dict(defaults)
    options = item.stash[_OPTIONS]
    values = {"variables": _variables(item), **dict(map(_value, options))}
    token = helpers.STEPS_TOGETHER.set(values.pop(_STEPS, False))
    defaults.update(values)
    if options:
        words = " ".join(f"--with {option}" for option in options)
        item.add_report_section("setup", "options of Replicator", words)
    yield
    defaults.update(before)
    helpers.STEPS_TOGETHER.reset(token)


def _variables(item: pytest.Item) -> str:
    """Returns the placement of a test's variables, if its options do not set it.

    Tests alternate between two placements, by their names: "auto", the default, shards
    on the CPUs of a test, while users on accelerators get mirrored variables.
    """
    if item.get_closest_marker("mirrored"):
        return "mirrored"
    return ("auto", "mirrored")[zlib.crc32(item.nodeid.encode()) % 2]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests of mirrored variables, or of speed, where they do not apply."""
    chosen = replicator.Replicator.__init__.__kwdefaults__["variables"]
    if chosen != "mirrored" and item.get_closest_marker("mirrored"):
        pytest.skip("counts or compares the components of mirrored variables")
    if item.get_closest_marker("fast") and choice.FAST != set(choice.FILES):
        pytest.skip("is about what replicator/_tf/fast saves, which is not in use")


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """Checks the outcome of a test against the list of refused tests."""
    outcome = yield
    config, chosen = pyfuncitem.config, pyfuncitem.stash[_OPTIONS]
    error = outcome.excinfo and outcome.excinfo[1]
    if not chosen or isinstance(error, pytest.skip.Exception):
        return
    if config.getoption("--note-refused"):
        refused = refusals.refuses(chosen[0], error)
        refused = refused and not refusals.asked(chosen[0], error)
        pyfuncitem.user_properties.append((_NOTE, refused))
        return
    listed = config.stash[_REFUSED].options(pyfuncitem.nodeid, chosen)
    wrong = refusals.verdict(listed, chosen, error)
    if wrong:
        outcome.force_exception(AssertionError(f"{pyfuncitem.nodeid} {wrong}"))
    elif listed or any(refusals.asked(option, error) for option in chosen):
        outcome.force_result(True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stops the servers."""
    session.config.stash[_SERVERS].close()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Writes the list of refused tests, if requested: what all processes ran."""
    if config.getoption("--note-refused"):
        (option,) = config.getoption("--with")
        reports = itertools.chain.from_iterable(terminalreporter.stats.values())
        tests = [(r.nodeid, dict(getattr(r, "user_properties", ()))) for r in reports]
        outcomes = {name: notes[_NOTE] for name, notes in tests if _NOTE in notes}
        config.stash[_REFUSED].note(option, outcomes)


@pytest.fixture(params=["v2", "v1"])
def behavior(request: pytest.FixtureRequest) -> Any:
    """Runs a test with tf.TensorShape as in TensorFlow 2, and as in 1."""
    if request.param == "v1":
        tf.compat.v1.disable_v2_tensorshape()
    yield
    if not request.config.getoption("--v1"):
        tf.compat.v1.enable_v2_tensorshape()
