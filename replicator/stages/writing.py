# SPDX-License-Identifier: Apache-2.0
"""Writes down the graphs of steps while they are built: for TensorBoard, and as SVG.

The stages are those of AutoDist (Zhang et al. 2020): the program of one device, with
variables in parts, with all replicas, and with real ops for what they communicate.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Collection
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.plan import files
from replicator.stages import sketch

STAGES = ("0-original", "1-after-partition", "2-after-in-graph", "3-transformed")
# What reads of a variable in parts add to the program of one device.
_PARTS = "partitioned"


class Stages:
    """Where the graphs of steps go.

    Args:
        path: A folder; there is one in it for each step that is built, and in that one
            for each stage.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = _made(path)
        self._numbers = itertools.count()
        with files.needing("matplotlib", "draw the stages of a step"):
            from replicator.stages import drawing  # what plots is not needed elsewhere
        self._draw: Callable[..., None] = drawing.draw

    def begin(self, name: str) -> Build:
        """Returns what takes the graphs of one build.

        Args:
            name: Of the step_fn.
        """
        return Build(self, name)

    def write(self, name: str, graphs: dict[str, tf.compat.v1.GraphDef]) -> None:
        """Writes the graphs of one build that has come to its end.

        Args:
            name: Of the step_fn.
            graphs: By stage.
        """
        called = re.sub(r"[^\w.-]+", "", name) or "step"
        folder = self._path / f"{called}-{next(self._numbers)}"
        folder.mkdir(parents=True, exist_ok=True)
        for stage, graph in graphs.items():
            # A thread of its own executes eagerly, whatever is being built here.
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                pool.submit(_for_tensorboard, folder / stage, graph).result()
            title = f"{name}, {stage}: {len(graph.node)} ops"
            self._draw(sketch.of(graph), title, folder / f"{stage}.svg")


def _made(path: Any) -> pathlib.Path:
    """Returns a folder, which is made unless it is there."""
    try:
        os.makedirs(os.fsdecode(path), exist_ok=True)
        return pathlib.Path(os.fsdecode(path))
    except (OSError, TypeError, ValueError) as error:
        raise errors.ArgumentError(
            errors.compose(
                f"stages cannot be written to {errors.shown(path)}: "
                f"{errors.told(error)}.",
                fix="name a folder that is there, or that can be made.",
            )
        ) from error


class Build:
    """The graphs of one build, as far as it has come."""

    def __init__(self, stages: Stages, name: str) -> None:
        self._stages, self._name = stages, name
        self._graphs: dict[str, tf.compat.v1.GraphDef] = {}

    def traced(self, graph: tf.Graph, first: Collection[tf.Operation]) -> None:
        """Takes the first two stages.

        Args:
            graph: Where the step is built.
            first: The ops of the first replica.
        """
        names = {op.name for op in first}
        whole = _part(graph, names)
        self._graphs[STAGES[0]] = _without_parts(whole)
        self._graphs[STAGES[1]] = whole

    def copied(self, graph: tf.Graph, ops: Collection[tf.Operation]) -> None:
        """Takes the third stage: the ops of all replicas."""
        self._graphs[STAGES[2]] = _part(graph, {op.name for op in ops})

    def done(self, graph: tf.Graph, ops: Collection[tf.Operation]) -> None:
        """Takes the last stage, and writes all."""
        self._graphs[STAGES[3]] = _part(graph, {op.name for op in ops})
        self._stages.write(self._name, self._graphs)


def _part(graph: Any, names: Collection[str]) -> tf.compat.v1.GraphDef:
    """Returns the part of a graph with some ops, and what they are given."""
    whole = graph.as_graph_def()
    part = tf.compat.v1.GraphDef(library=whole.library, versions=whole.versions)
    known = {node.name for node in whole.node if node.name in names}
    given: dict[str, None] = {}
    for node in whole.node:
        if node.name not in known:
            continue
        for source in node.input:
            name = source.removeprefix("^").partition(":")[0]
            if name not in known:
                given[name] = None
    for node in whole.node:
        if node.name in known or node.name in given:
            own = part.node.add()
            own.CopyFrom(node)
            if node.name in given:  # it stands for what is outside
                del own.input[:]
    return part


def _without_parts(graph: tf.compat.v1.GraphDef) -> tf.compat.v1.GraphDef:
    """Returns a graph without what the parts of variables add to it."""
    left = tf.compat.v1.GraphDef(library=graph.library, versions=graph.versions)
    gone = {node.name for node in graph.node if f"/{_PARTS}" in f"/{node.name}"}
    for node in graph.node:
        if node.name not in gone:
            own = left.node.add()
            own.CopyFrom(node)
            kept = [
                source
                for source in node.input
                if source.removeprefix("^").partition(":")[0] not in gone
            ]
            own.input[:] = kept
    return left


def _for_tensorboard(folder: pathlib.Path, graph: tf.compat.v1.GraphDef) -> None:
    writer = tf.summary.create_file_writer(os.fspath(folder))
    with writer.as_default():
        tf.summary.graph(graph)
    writer.close()
