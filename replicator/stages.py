# SPDX-License-Identifier: Apache-2.0
"""Writes the graphs of steps while they are built, for TensorBoard.

The stages are those of AutoDist (Zhang et al. 2020): the program of one device, with
partitioned variables, with all replicas, and with communication lowered to real ops.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import pathlib
import re
from collections.abc import Collection
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import errors

STAGES = ("0-original", "1-after-partition", "2-after-in-graph", "3-transformed")
# The scope of the ops that reads of partitioned variables add to the program.
_PARTS = "partitioned"


class Stages:
    """Writes the graphs of steps to a folder.

    Args:
        path: The folder. Each step that is built gets a folder in it, with one for each
            stage.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = _created(path)
        self._numbers = itertools.count()
        self._site = errors.user_line()
        self._built: set[str] = set()  # the steps that were built, by their lines
        self._ran: dict[str, None] = {}  # those that ran, in their order

    def begin(self, name: str, line: str) -> Recorder:
        """Returns a recorder for the graphs of one build.

        Args:
            name: The name of step_fn.
            line: The line that defines it, as in `ran`.
        """
        self._built.add(line)
        return Recorder(self, name)

    def ran(self, line: str) -> None:
        """Records that a step is run, which may have been built before.

        Args:
            line: The line that defines its step_fn.
        """
        self._ran[line] = None

    def warn_of_missing(self) -> None:
        """Warns, at the end, of steps of which nothing was recorded."""
        missing = [line for line in self._ran if line not in self._built]
        if missing or not self._built:
            logging.warning(
                "stages, at %s, recorded nothing%s. A step is recorded when it is "
                "built: make its first call, with arguments of these shapes, in the "
                "block.",
                self._site,
                f" of steps that were built before: {'; '.join(missing)}"
                if missing
                else ": no step was built in its block",
            )

    def write(self, name: str, graphs: dict[str, tf.compat.v1.GraphDef]) -> None:
        """Writes the graphs of one finished build.

        Args:
            name: The name of step_fn.
            graphs: The graphs by stage.
        """
        folder_name = re.sub(r"[^\w.-]+", "", name) or "step"
        folder = self._path / f"{folder_name}-{next(self._numbers)}"
        folder.mkdir(parents=True, exist_ok=True)
        for stage, graph in graphs.items():
            # A new thread executes eagerly, whatever is being built in this one.
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                pool.submit(_for_tensorboard, folder / stage, graph).result()


def _created(path: Any) -> pathlib.Path:
    """Returns a folder, creating it unless it exists."""
    try:
        os.makedirs(os.fsdecode(path), exist_ok=True)
        return pathlib.Path(os.fsdecode(path))
    except (OSError, TypeError, ValueError) as error:
        raise errors.ArgumentError(
            f"stages cannot be written to {errors.repr_of(path)}: "
            f"{errors.summary(error)}.",
            fix="name a folder that exists, or that can be created.",
        ) from error


class Recorder:
    """Records the graphs of one build."""

    def __init__(self, stages: Stages, name: str) -> None:
        self._stages, self._name = stages, name
        self._graphs: dict[str, tf.compat.v1.GraphDef] = {}

    def traced(self, graph: tf.Graph, first: Collection[tf.Operation]) -> None:
        """Records the first two stages.

        Args:
            graph: The graph that the step is built into.
            first: The ops of the first replica.
        """
        names = {op.name for op in first}
        whole = _part(graph, names)
        self._graphs[STAGES[0]] = _without_parts(whole)
        self._graphs[STAGES[1]] = whole

    def copied(self, graph: tf.Graph, ops: Collection[tf.Operation]) -> None:
        """Records the third stage: the ops of all replicas."""
        self._graphs[STAGES[2]] = _part(graph, {op.name for op in ops})

    def finish(self, graph: tf.Graph, ops: Collection[tf.Operation]) -> None:
        """Records the last stage, and writes all of them."""
        self._graphs[STAGES[3]] = _part(graph, {op.name for op in ops})
        self._stages.write(self._name, self._graphs)


def _part(graph: Any, names: Collection[str]) -> tf.compat.v1.GraphDef:
    """Returns the part of a graph that consists of some ops and their inputs."""
    whole = graph.as_graph_def()
    part = tf.compat.v1.GraphDef(library=whole.library, versions=whole.versions)
    members = {node.name for node in whole.node if node.name in names}
    inputs: dict[str, None] = {}
    for node in whole.node:
        if node.name not in members:
            continue
        for source in node.input:
            name = source.removeprefix("^").partition(":")[0]
            if name not in members:
                inputs[name] = None
    for node in whole.node:
        if node.name in members or node.name in inputs:
            copy = part.node.add()
            copy.CopyFrom(node)
            if node.name in inputs:  # from outside: without inputs of its own
                del copy.input[:]
    return part


def _without_parts(graph: tf.compat.v1.GraphDef) -> tf.compat.v1.GraphDef:
    """Returns a graph without the ops that partitioned variables add to it."""
    result = tf.compat.v1.GraphDef(library=graph.library, versions=graph.versions)
    removed = {node.name for node in graph.node if f"/{_PARTS}" in f"/{node.name}"}
    for node in graph.node:
        if node.name not in removed:
            copy = result.node.add()
            copy.CopyFrom(node)
            sources = [
                source
                for source in node.input
                if source.removeprefix("^").partition(":")[0] not in removed
            ]
            copy.input[:] = sources
    return result


def _for_tensorboard(folder: pathlib.Path, graph: tf.compat.v1.GraphDef) -> None:
    writer = tf.summary.create_file_writer(os.fspath(folder))
    with writer.as_default():
        tf.summary.graph(graph)
    writer.close()
