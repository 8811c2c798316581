# SPDX-License-Identifier: Apache-2.0
"""The program `python -m replicator.profile`, on good and on bad arguments."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from replicator.profile import __main__
from tests import mains

_MODULE = """
import replicator
import tensorflow as tf

batches = []
strategies = []


def _make(rows, width, more):
    repl = replicator.Replicator(["CPU:0", "CPU:1"])
    strategies.append(repl.strategy)
    with repl.context():
        matrix = tf.Variable(tf.ones([width, width]) / width, name="matrix")
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.1))

    def input_fn(ctx):
        batches.append(ctx.per_replica_batch_size(rows))
        return tf.data.Dataset.from_tensors(tf.ones([batches[-1], width])).repeat(3)

    def step_fn(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ matrix) ** 2)
        for _ in range(more):
            x = x @ (matrix + 0.0)
        optimizer.apply_gradients([(tape.gradient(loss, matrix), matrix)])
        return repl.all_reduce(loss, "mean") + tf.reduce_sum(x)  # the loss

    return repl, step_fn, input_fn


def make():
    return _make(8, 16, 0)


def computes():
    return _make(1024, 256, 10)


def communicates():
    repl = replicator.Replicator(["CPU:0", "CPU:1"])
    with repl.context():
        v = tf.Variable(tf.ones([1 << 21]))

    def step_fn():
        x = v.read_value()
        for _ in range(4):
            x = repl.all_gather(x[: 1 << 20])  # gathered
        return x[0]

    return repl, step_fn


def on_one():
    repl = replicator.Replicator(["CPU:0"])
    return repl, lambda: repl.all_reduce(tf.ones([4]))


def fails():
    raise RuntimeError("no\\nluck")


def without_inputs():
    repl = replicator.Replicator(["CPU:0", "CPU:1"])
    return repl, repl.all_reduce, lambda ctx: tf.data.Dataset.range(0)


def fails_while_it_runs():
    repl = replicator.Replicator(["CPU:0", "CPU:1"])
    with repl.context():
        v = tf.Variable(0.0)

    def step_fn():
        v.assign_add(repl.all_reduce(1.0, "mean"))
        tf.debugging.assert_less(v.read_value(), 3.0, message="it is too many")

    return repl, step_fn


def needs_two():
    repl = replicator.Replicator(["CPU:0", "CPU:1"])
    return repl, lambda: repl.broadcast(tf.ones([4]), root=1)


def of_global_batches():
    repl, step_fn, _ = make()
    batches.clear()

    def noted(x):
        batches.append(x.shape[0])
        return step_fn(x)

    whole = tf.data.Dataset.from_tensors(tf.ones([8, 16])).repeat(3)
    return repl.build(noted, whole, input_mode="global_batch")


def is_interrupted():
    raise KeyboardInterrupt


def fails_in_step():
    repl = replicator.Replicator(["CPU:0", "CPU:1"])
    return repl, lambda: tf.debugging.assert_equal(tf.constant(1), repl.replica_id)
"""


@pytest.fixture
def module(tmp_path: pathlib.Path, monkeypatch: Any) -> str:
    return mains.module_of(_MODULE, tmp_path, monkeypatch)


def _status(*arguments: str) -> int:
    return mains.status(__main__.main, *arguments)


def test_the_program_prints_draws_and_writes(module: str, capsys: Any) -> None:
    files = ("--json=all.json", "--plot=all.svg", "--trace=trace.json")
    assert _status(*files, "--trials=5", f"{module}:make") == 0
    printed, line = capsys.readouterr().out, mains.line_of("# the loss", _MODULE)
    assert f":{line} in step_fn" in "".join(printed.split("\n"))
    assert "it pays while T_sync / T_comp < R - 1" in " ".join(printed.split())
    assert "On these same " in printed and "epoch" in printed
    facts = json.loads(pathlib.Path("all.json").read_text())
    parts = [c["seconds"] for c in facts["communication"]]
    whole = facts["fixed"] + facts["compute"] + facts["once"] + sum(parts)
    assert whole == pytest.approx(facts["step"])
    assert all(seconds >= 0 for seconds in (facts["compute"], *parts))
    for prediction in facts["predicted"].values():
        assert [step["replicas"] for step in prediction] == list(range(1, 65))
        assert all(
            0 < step["low"] <= step["step"] <= step["high"] for step in prediction
        )
    assert facts["predicted"]["here"][0]["step"] == facts["alone"]
    assert facts["predicted"]["here"][1]["step"] == pytest.approx(facts["step"])
    assert "all_reduce mean" in pathlib.Path("all.svg").read_text()
    imported = __import__(module)
    assert imported.batches == [4, 4, 4]  # as many on one replica as on each of two


def test_communications_of_a_trace_bear_the_users_line(module: str) -> None:
    assert _status("--trace=trace.json", "--trials=1", f"{module}:make") == 0
    trace = json.loads(pathlib.Path("trace.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events)
    lines = {event["args"]["line"] for event in events if "line" in event["args"]}
    actual = {line.rpartition(":")[2] for line in lines}
    calls = ("optimizer.apply_gradients", "# the loss")
    assert actual == {f"{mains.line_of(call, _MODULE)} in step_fn" for call in calls}
    names = {
        event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    }
    assert {"replica 0", "replica 1", "communication"} <= names


@pytest.mark.parametrize(
    ("name", "least", "most"), [("computes", 0.0, 0.3), ("communicates", 0.5, 1.0)]
)
def test_who_communicates_much_is_told_so(
    module: str, name: str, least: float, most: float
) -> None:
    assert _status("--json=all.json", "--trials=5", f"{module}:{name}") == 0
    facts = json.loads(pathlib.Path("all.json").read_text())
    share = sum(c["seconds"] for c in facts["communication"]) / facts["step"]
    assert least <= share <= most


def test_a_program_of_one_replica_is_predicted_by_the_calibration(module: str) -> None:
    assert _status("--json=all.json", "--trials=3", f"{module}:on_one") == 0
    facts = json.loads(pathlib.Path("all.json").read_text())
    assert facts["step"] == facts["alone"] and facts["rates"] == "by default"


def test_another_network_and_strategy(module: str, capsys: Any) -> None:
    steps = {}
    for bandwidth in ("0.1", "100"):
        flags = (f"--bandwidth={bandwidth}", "--latency=5", "--strategy=PS")
        status = _status(*flags, "--json=all.json", "--trials=2", f"{module}:make")
        assert status == 0
        facts = json.loads(pathlib.Path("all.json").read_text())
        apart = facts["predicted"]["apart"][63]
        steps[bandwidth] = apart["sync"]
        assert facts["network"]["latency"] == pytest.approx(5e-6)
        assert facts["network"]["bytes_per_second"] == pytest.approx(
            float(bandwidth) * 1e9 / 8
        )
    assert steps["0.1"] > steps["100"] > 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "PS(" in printed and "100 Gbit/s" in printed
    assert __import__(module).strategies[0].nodes is not None


def test_a_program_that_needs_all_replicas_is_measured_without_predictions(
    module: str, capsys: Any
) -> None:
    files = ("--json=all.json", "--plot=all.svg", "--trace=trace.json")
    assert _status(*files, "--trials=3", f"{module}:needs_two") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "broadcast" in printed and "Nothing is predicted" in printed
    facts = json.loads(pathlib.Path("all.json").read_text())
    assert facts["alone"] is None and facts["predicted"] == facts["verdict"] == {}
    assert "root=1" in facts["needs_all"]
    assert [c["what"] for c in facts["communication"]] == ["broadcast root=1"]


def test_a_replica_alone_keeps_its_share_of_a_global_batch(module: str) -> None:
    step = f"{module}:of_global_batches"
    assert _status("--json=all.json", "--trials=2", step) == 0
    facts = json.loads(pathlib.Path("all.json").read_text())
    assert facts["needs_all"] is None and len(facts["predicted"]) == 2
    assert set(__import__(module).batches) == {4}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "usage: python -m replicator.profile module:make"),
        (("{}:make", "more"), "usage"),
        (("{}:fails",), "RuntimeError: no luck"),  # others are tested in plan/
        (("{}:fails_in_step",), "the step of "),
        (("{}:without_inputs",), "InputError: the inputs do not have one element"),
        (("{}:fails_while_it_runs",), "assertion failed: [it is too many]"),
        (("{}:make", "--trials=0"), "--trials"),
        (("{}:make", "--trials=many"), "--trials"),
        (("{}:make", "--calibration=."), "cannot read a calibration"),
        (("{}:make", "--strategy=."), "--strategy: "),
        (("{}:make", "--bandwidth=-1"), "--bandwidth was given -1.0"),
        (("{}:make", "--latency=nan"), "--latency was given nan"),
        (("{}:make", "--bandwidth=much"), "bandwidth"),
        (("{}:make", "--strategy=Fastest"), "one of AllReduce, Auto"),
        (("{}:make", "--calibration=nowhere.json"), "cannot read a calibration"),
        (("{}:make", "--plot=all.gif"), "suffix"),
        (("{}:make", "--trace=nowhere/trace.json"), "--trace: FileNotFoundError"),
        (("{}:make", "--colour=red"), "colour"),
    ],
)
def test_bad_input_is_one_line(
    module: str, capsys: Any, arguments: tuple[str, ...], message: str
) -> None:
    assert _status(*(argument.format(module) for argument in arguments)) == 2
    stderr = capsys.readouterr().err.strip()
    assert message in stderr and "\n" not in stderr and "Traceback" not in stderr
    assert 'File "' not in stderr


def test_an_interrupt_is_no_traceback(module: str, capsys: Any) -> None:
    assert _status(f"{module}:is_interrupted") == 130
    assert capsys.readouterr().err.strip() == "interrupted"
