# SPDX-License-Identifier: Apache-2.0
"""The program `python -m replicator.plan`, on good and on bad arguments."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import tensorflow as tf

from replicator.plan import Plan, __main__
from tests import mains

_ROOT = pathlib.Path(__file__).parents[2]

_MODULE = """
import replicator
import tensorflow as tf

ran = []
number = 3


def _repl():
    return replicator.Replicator(["CPU:0", "CPU:1"])


def make():
    repl = _repl()

    def step_fn(x):
        tf.py_function(lambda: ran.append(1), [], [])
        return repl.all_reduce(x, "max")

    return repl, step_fn, lambda: tf.ones([3])


def without_inputs():
    repl = _repl()
    return repl, lambda: repl.broadcast(tf.ones([2]), 1)


def built():
    repl = _repl()
    whole = tf.data.Dataset.from_tensors(tf.ones([8, 2]))
    return repl.build(lambda x: repl.all_reduce(x), whole, input_mode="global_batch")


class Nested:
    make = staticmethod(without_inputs)


def elsewhere():
    names = [f"/job:worker/task:{k}/device:CPU:0" for k in (0, 1)]
    repl = replicator.Replicator(names)
    return repl, lambda: repl.all_reduce(1.0)


def fails():
    raise RuntimeError("no\\nluck")


def a_list():
    return [1, 2]


def no_replicator():
    return 1, make


def no_step():
    return _repl(), 2


def mismatch():
    repl = _repl()
    return repl, lambda: repl.all_reduce(1.0) if repl.replica_id else tf.ones([])
"""


@pytest.fixture
def module(tmp_path: pathlib.Path, monkeypatch: Any) -> str:
    """Returns the name of a module in the working directory."""
    return mains.module_of(_MODULE, tmp_path, monkeypatch)


def _status(*arguments: str) -> int:
    return mains.status(__main__.main, *arguments)


def test_the_program_prints_and_writes_without_running(
    module: str, capsys: Any
) -> None:
    arguments = ("--json=plan.json", "--plot=plan.svg", f"{module}:make")
    assert _status(*arguments) == 0
    printed, line = capsys.readouterr().out, mains.line_of('"max"', _MODULE)
    assert "all_reduce max" in printed and f"{module}.py:{line} in step_fn" in printed
    plan = Plan.from_json(pathlib.Path("plan.json").read_text())
    assert [(r.primitive, r.nbytes) for r in plan] == [("all_reduce", 24)]
    assert "all_reduce max, 24 B" in pathlib.Path("plan.svg").read_text()
    assert not sys.modules[module].ran


@pytest.mark.parametrize("name", ["without_inputs", "Nested.make"])
def test_the_input_fn_may_be_left_away(name: str, module: str, capsys: Any) -> None:
    assert _status(f"{module}:{name}") == 0
    assert "broadcast root=1" in capsys.readouterr().out


@pytest.mark.parametrize("hosts", [[], ["--simulate-hosts=2"]], ids=["one", "two"])
def test_make_may_return_a_step(module: str, hosts: list[str]) -> None:
    assert _status(f"{module}:built", "--json=plan.json", *hosts) == 0
    plan = Plan.from_json(pathlib.Path("plan.json").read_text())
    (row,) = plan
    replicas = 2 * (len(hosts) + 1)
    sizes = [value.shape for (value,) in row.operands]
    assert len(sizes) == replicas and sum(rows for rows, _ in sizes) == 8


def test_programs_of_sessions_have_plans_too(module: str, capsys: Any) -> None:
    with tf.Graph().as_default():
        assert _status(f"{module}:without_inputs") == 0
    assert "broadcast root=1" in capsys.readouterr().out


def test_many_hosts_are_simulated(module: str, capsys: Any) -> None:
    arguments = ("--simulate-hosts=64", "--json=plan.json", f"{module}:make")
    assert _status(*arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Communication of 128 replicas on 64 hosts" in printed
    assert "a step by the calibration" in printed
    assert "Slowest link: /job:worker/replica:0/task:" in printed
    plan = Plan.from_json(pathlib.Path("plan.json").read_text())
    assert len(plan.hosts) == 64 and plan[0].algorithm == "tree of hosts"
    assert plan[0].between == 2 * 63 * 12  # of 3 numbers, once from and to each host
    assert not sys.modules[module].ran


def test_one_host_is_simulated_as_it_is(module: str, capsys: Any) -> None:
    results = []
    for arguments in ((), ("--simulate-hosts=1",)):
        assert _status(*arguments, "--json=plan.json", f"{module}:make") == 0
        assert "Slowest link" not in capsys.readouterr().out
        plan = Plan.from_json(pathlib.Path("plan.json").read_text())
        results.append([(r.primitive, r.links, r.algorithm, r.times) for r in plan])
    assert results[0] == results[1]


BAD = {
    "": "usage: python -m replicator.plan module:make",
    "MODULE:make MODULE:make": "usage: python -m replicator.plan module:make",
    "MODULE": "'MODULE' is not of the form module:make",
    ":make": "':make' is not of the form module:make",
    "MODULE:": "'MODULE:' is not of the form module:make",
    "MODULE.py:make": "MODULE.py is a file; in 'MODULE.py:make', name a module as ",
    "./MODULE:make": "./MODULE is a file; ",
    "no_such_module:make": "ModuleNotFoundError: No module named 'no_such_module'",
    "MODULE:nothing": "module MODULE has no nothing",
    "MODULE:Nested.nothing": "module MODULE has no Nested.nothing",
    "MODULE:number": "MODULE:number is an int; expected a function",
    "MODULE:fails": "MODULE:fails(): RuntimeError: no luck (raised at MODULE.py:",
    "MODULE:a_list": "returned a list; expected a tuple (repl, step_fn) or (repl, ",
    "MODULE:no_replicator": "returned an int first; expected a Replicator",
    "MODULE:no_step": "returned an int second; expected the step_fn",
    "MODULE:mismatch": "the step of MODULE:mismatch: MismatchError: Communication call",
    "MODULE:make --plot=plan.pdf": "--plot: ArgumentError: a plan cannot be plotted",
    "MODULE:make --json=no/such/folder": "--json: FileNotFoundError: [Errno 2] No such",
    "MODULE:make --plot=no/folder.png": "--plot: FileNotFoundError: [Errno 2]",
    "MODULE:make --simulate-hosts=0": "flag --simulate-hosts=0",
    "MODULE:make --simulate-hosts=x": "flag --simulate-hosts=x",
    "MODULE:elsewhere --simulate-hosts=3": "--simulate-hosts needs the devices of one",
    "MODULE:make --no_flag=1": "Unknown command line flag 'no_flag'",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_input_is_one_line_and_status_2(
    arguments: str, module: str, capsys: Any
) -> None:
    assert _status(*arguments.replace("MODULE", module).split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert BAD[arguments].replace("MODULE", module) in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status", "text"), [("make", 0, "all_reduce max"), ("fails", 2, "no luck")]
)
def test_as_a_program_it_neither_warns_nor_traces_back(
    name: str, status: int, text: str, module: str
) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "replicator.plan", f"{module}:{name}"],
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == status, result.stderr
    assert text in (result.stdout if status == 0 else result.stderr)
    assert "Traceback" not in result.stderr and "RuntimeWarning" not in result.stderr
