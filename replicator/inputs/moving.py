# SPDX-License-Identifier: Apache-2.0
"""Moves datasets from this process to their replicas' hosts, as graphs.

Batches then do not cross the network. A dataset's captures move with it, as in
tf.data's own service: tensors and the contents of lookup tables. A dataset that calls
Python stays, since Python only runs here, and so does one with state that is visible
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from replicator import errors
from replicator.graph.ir import walk

_IGNORE_STATE = 1  # of random ops, say; they restart with an iterator anyway
_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
# A copy would miss writes to the original.
_STATES = ("VarHandleOp", "VariableV2", "MutableHashTable", "MutableDenseHashTable")
_HANDLE = "handle"  # an op type of our own: a resource that only this process has
# These recreate an unknown resource: seeds, or memory for a cache.
_RENEWING = ("Shuffle", "CacheDataset")
_RENEWED = ("SeedGenerator", "MemoryCache")
_DRAWING = ("Shuffle", "RandomDataset")  # datasets whose inputs include seeds


class Sited(NamedTuple):
    """A dataset and its host.

    Attributes:
        dataset: The dataset.
        home: The CPU of a host; None: in this process, or where a session puts it.
        stays: Why it did not move, in words; "" if it did or need not.
    """

    dataset: tf.data.Dataset
    home: str | None = None
    stays: str = ""


def moved(dataset: tf.data.Dataset, home: str | None) -> Sited:
    """Moves a dataset to a host; returns the original if it has to stay.

    Args:
        dataset: A dataset created in this process.
        home: The CPU of a host; None: it is to stay.
    """
    if home is None:
        return Sited(dataset)
    variant = tf.data.experimental.to_variant(dataset)
    symbolic = tf.is_symbolic_tensor(variant)
    stays = _reason(set(_types_above(variant))) if symbolic else ""
    if stays:
        return Sited(dataset, stays=stays)
    try:
        serialized = tf.raw_ops.DatasetToGraphV2(
            input_dataset=variant, external_state_policy=_IGNORE_STATE
        )
        stays = "" if symbolic else reason(serialized.numpy())
        if stays:
            return Sited(dataset, stays=stays)
        with tf.device(home):
            remote_variant = tf.raw_ops.DatasetFromGraph(graph_def=serialized)
            remote_dataset = tf.data.experimental.from_variant(
                remote_variant, dataset.element_spec
            )
    except tf.errors.OpError as error:
        return Sited(dataset, stays=f"cannot be copied ({errors.summary(error)})")
    return Sited(remote_dataset, home)


def warn_of_those_that_stay(sited: Iterable[Sited], made_by: Any) -> None:
    """Warns once about datasets that feed other hosts from this one.

    Args:
        sited: All datasets.
        made_by: The input_fn that created them, or one of them.
    """
    reasons = dict.fromkeys(dataset.stays for dataset in sited if dataset.stays)
    if not reasons:
        return
    line = errors.definition(made_by) if callable(made_by) else ""
    logging.warning(
        "The datasets of the input_fn at %s are not created on the hosts of their "
        "replicas: each %s. They stay in this process, and all their batches cross "
        "the network.",
        line or errors.user_line(),
        ", or ".join(reasons),
    )


def graph_of(dataset: tf.data.Dataset) -> Any:
    """Returns the GraphDef of a dataset created eagerly in this process."""
    serialized = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset),
        external_state_policy=_IGNORE_STATE,
    )
    return tf.compat.v1.GraphDef.FromString(serialized.numpy())


def is_repeatable(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset without random numbers has the same elements whenever read."""
    graph = graph_of(dataset)
    if dataset.options().deterministic is False or {*_types_in(graph)} & _PYTHON:
        return False
    nodes = [node for f in graph.library.function for node in f.node_def]
    return not any(
        node.attr["deterministic"].s == b"false"
        for node in [*graph.node, *nodes]
        if "deterministic" in node.attr
    )


def random_parts(dataset: tf.data.Dataset) -> list[str] | None:
    """Returns the ops by which a dataset draws random numbers, with their seeds.

    Args:
        dataset: A dataset created eagerly in this process.

    Returns:
        The types of the ops, with their seeds; None if one of them has no seed, so that
        each copy of the dataset draws different numbers.
    """
    graph = graph_of(dataset)
    draws = []
    values = {
        node.name: tf.make_ndarray(node.attr["value"].tensor)
        for node in graph.node
        if node.op == "Const" and node.attr["dtype"].type == tf.int64.as_datatype_enum
    }
    nodes = [node for f in graph.library.function for node in f.node_def]
    for node in [*graph.node, *nodes]:
        if {"seed", "seed2"} <= set(node.attr):
            seeds = [node.attr["seed"].i, node.attr["seed2"].i]
        elif node.op.startswith(_DRAWING):
            read = [name.partition(":")[0] for name in node.input]
            seeds = [int(values[n]) for n in read if n in values and not values[n].ndim]
            seeds = seeds[-2:]
        else:
            continue
        if not any(seeds):
            return None
        draws.append(f"{node.op} {seeds}")
    return sorted(draws)


def reason(serialized: bytes) -> str:
    """Returns why a dataset has to stay; "" if it may move.

    Args:
        serialized: Its GraphDef, empty if that would exceed TensorFlow's limit.
    """
    if not serialized:
        return "holds more than 2 GB"
    return _reason(set(_types_in(tf.compat.v1.GraphDef.FromString(serialized))))


def _reason(op_types: set[str]) -> str:
    """Returns why a dataset with ops of these types has to stay; "" if it may move."""
    if op_types & _PYTHON:
        return (
            "calls Python (by from_generator, py_function or numpy_function), which "
            "only this process can"
        )
    if any(name.startswith(_STATES) for name in op_types):
        return "reads a variable or a table that may change"
    if _HANDLE in op_types:
        return "reads a table, a queue or another resource of this process"
    if "RemoteCall" in op_types:
        return "is copied to a device by the user"
    return ""


def _types_in(graph: Any) -> Iterable[str]:
    """Yields the types of a GraphDef's ops, including those in its functions."""
    handles = {
        node.name
        for node in graph.node
        if node.op == "Const"
        and node.attr["dtype"].type == tf.resource.as_datatype_enum
    }
    for node in graph.node:
        yield node.op
        read = {name.lstrip("^").partition(":")[0] for name in node.input}
        if read & handles and not node.op.startswith(_RENEWING):
            yield _HANDLE
    for function in graph.library.function:
        yield from (node.op for node in function.node_def)


def _types_above(tensor: tf.Tensor) -> Iterable[str]:
    """Yields the types of all ops that a symbolic tensor depends on."""
    library = {
        function.signature.name: function.node_def
        for function in tensor.graph.as_graph_def().library.function
    }
    functions: set[str] = set()
    for op in walk.upstream([tensor.op]):
        yield op.type
        holds = any(output.dtype == tf.resource for output in op.outputs)
        if holds and not op.type.endswith(_RENEWED):
            yield _HANDLE
        yield from _types_called(op.node_def, library, functions)


def _types_called(node: Any, library: Any, visited: set[str]) -> Iterable[str]:
    """Yields the op types in functions that a node calls, except those seen before.

    Args:
        node: The NodeDef.
        library: The nodes of each function, by its name.
        visited: The names of the functions seen so far; this node's are added.
    """
    for value in node.attr.values():
        for name in (value.func.name, *(f.name for f in value.list.func)):
            if name in visited or name not in library:
                continue
            visited.add(name)
            for inner in library[name]:
                yield inner.op
                yield from _types_called(inner, library, visited)
