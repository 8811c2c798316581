# SPDX-License-Identifier: Apache-2.0
"""The output of `Replicator.stages`: a step after each stage of its build."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator.graph.ir import placeholder
from replicator.stages import STAGES
from tests import helpers


def _graph(folder: pathlib.Path) -> tf.compat.v1.GraphDef:
    """Returns the graph in a folder for TensorBoard."""
    (path,) = folder.glob("events*")
    for record in tf.data.TFRecordDataset(str(path)):
        event = tf.compat.v1.Event.FromString(record.numpy())
        if event.graph_def:
            return tf.compat.v1.GraphDef.FromString(event.graph_def)
    raise AssertionError("no graph is there")


def _calls(graph: tf.compat.v1.GraphDef) -> int:
    nodes = [node for node in graph.node if node.op == placeholder.TYPE]
    return sum(placeholder.call_of(n.attr["token"].s) is not None for n in nodes)


@pytest.mark.battery(5)
@pytest.mark.parametrize("build", ["trace", "clone"])
@pytest.mark.parametrize("way", ["eager", "function", "session"])
def test_stages_hold_one_replica_then_all_then_no_placeholder(
    way: str, build: str, tmp_path: pathlib.Path
) -> None:
    repl = helpers.make(3, build=build)

    def step_fn() -> tf.Tensor:
        return repl.all_reduce(repl.all_gather(tf.ones([2])), "mean")

    with repl.stages(tmp_path / "new"):
        if way == "eager":
            repl.run(step_fn)
        elif way == "function":
            tf.function(lambda: repl.run(step_fn))()
        else:
            with tf.Graph().as_default():
                repl.run(step_fn)
    repl.run(lambda: tf.constant(1.0))  # which is not written
    (folder,) = (tmp_path / "new").iterdir()
    assert folder.name == "step_fn-0"
    graphs = {stage: _graph(folder / stage) for stage in STAGES}
    assert [_calls(graphs[stage]) for stage in STAGES] == [2, 2, 6, 0]
    for graph in graphs.values():
        names = {node.name for node in graph.node}
        assert len(names) == len(graph.node)
        for node in graph.node:
            inputs = {s.removeprefix("^").partition(":")[0] for s in node.input}
            assert inputs <= names
    final = graphs[STAGES[3]].node
    assert {f"CPU:{k}" for k in range(3)} <= {n.device[-5:] for n in final}
    assert any(node.name.startswith("communicate/") for node in final)


def test_a_build_that_fails_writes_nothing(tmp_path: pathlib.Path) -> None:
    repl = helpers.make(2)

    def step_fn() -> tf.Tensor:
        return repl.all_reduce(tf.ones([repl.replica_id + 1]))

    with repl.stages(tmp_path), pytest.raises(replicator.MismatchError):
        repl.run(step_fn)
    assert not list(tmp_path.iterdir())


def test_each_step_has_a_folder(tmp_path: pathlib.Path) -> None:
    repl = helpers.make(2)
    with repl.stages(tmp_path):
        for _ in range(2):
            repl.run(lambda: tf.constant(1.0))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2 and names[0].endswith("-0") and names[1].endswith("-1")


@pytest.mark.parametrize("path", [None, 7, "", "file", "file/inside", "a\0b"])
def test_folders_that_cannot_be_made_are_refused_at_once(
    path: Any, tmp_path: pathlib.Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("text")
    with pytest.raises(
        replicator.errors.ArgumentError, match="(?s)stages cannot be written to.*Fix:"
    ):
        with helpers.make(2).stages(path):
            raise AssertionError("the block is not entered")


def _step_fns(repl: replicator.Replicator) -> list[Any]:
    return [
        lambda: repl.all_reduce(1.0),
        lambda: repl.all_reduce(2.0),
    ]


@pytest.mark.parametrize("way", ["run", "step", "function"])
def test_steps_that_were_built_before_are_told(
    way: str, tmp_path: pathlib.Path, caplog: Any
) -> None:
    repl = helpers.make(2)
    one, two = _step_fns(repl)
    step = repl.build(one)
    run = {
        "run": lambda: repl.run(one),
        "step": step,
        "function": tf.function(lambda: repl.run(one)),
    }[way]
    with repl.stages(tmp_path):
        for _ in range(2):
            run()
    assert len(list(tmp_path.iterdir())) == 1 and not caplog.text
    with repl.stages(tmp_path):
        run()
    assert "test_stages.py" in caplog.text and "recorded nothing" in caplog.text
    assert ("_step_fns" in caplog.text or "<lambda>" in caplog.text) == (
        way != "function"  # of which TensorFlow runs the graph, without us
    )
    assert "make its first call" in caplog.text
    caplog.clear()
    with repl.stages(tmp_path):
        run()
        repl.run(two)
    assert bool(caplog.text) == (way != "function")


def test_blocks_that_build_nothing_are_told_unless_they_fail(
    tmp_path: pathlib.Path, caplog: Any
) -> None:
    repl = helpers.make(2)
    with pytest.raises(KeyError), repl.stages(tmp_path):
        raise KeyError
    assert not caplog.text
    with repl.stages(tmp_path):
        pass
    assert "no step was built in its block" in caplog.text
