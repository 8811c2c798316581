# SPDX-License-Identifier: Apache-2.0
"""Datasets made in this process go to the hosts of their replicas, as a graph.

Batches then do not cross the network. What a dataset captures goes with it, as for
tf.data's own service: tensors and the contents of lookup tables. A dataset that calls
Python stays, which only runs here, and so does one with a state that others see.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from replicator import errors

_IGNORE_STATE = 1  # of random ops, say; they begin anew anyway where an iterator does
_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
# A copy would not see what is written to the original.
_STATES = ("VarHandleOp", "VariableV2", "MutableHashTable", "MutableDenseHashTable")
_HANDLE = "handle"  # among types of ops: something that is in this process only
# These get a new one where theirs is unknown: seeds, or memory for a cache.
_RENEWING = ("Shuffle", "CacheDataset")
_RENEWED = ("SeedGenerator", "MemoryCache")
_DRAWING = ("Shuffle", "RandomDataset")  # datasets, by inputs that are seeds


class Sited(NamedTuple):
    """A dataset, and where it is.

    Attributes:
        dataset: The dataset.
        home: The CPU of a host; None: in this process, or where a session puts it.
        stays: Why it did not go where it should, in words; "" if it did.
    """

    dataset: tf.data.Dataset
    home: str | None = None
    stays: str = ""


def moved(dataset: tf.data.Dataset, home: str | None) -> Sited:
    """Returns a dataset at a place, the dataset itself if it has to stay.

    Args:
        dataset: Made in this process.
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
            there = tf.raw_ops.DatasetFromGraph(graph_def=serialized)
            made = tf.data.experimental.from_variant(there, dataset.element_spec)
    except tf.errors.OpError as error:
        return Sited(dataset, stays=f"cannot be copied ({errors.told(error)})")
    return Sited(made, home)


def warn_of_those_that_stay(sited: Iterable[Sited], made_by: Any) -> None:
    """Says once that datasets feed other hosts from here.

    Args:
        sited: All of them.
        made_by: The input_fn that made them, or one of them.
    """
    reasons = dict.fromkeys(own.stays for own in sited if own.stays)
    if not reasons:
        return
    line = errors.definition(made_by) if callable(made_by) else ""
    logging.warning(
        "The datasets of the input_fn at %s are not made on the hosts of their "
        "replicas: each %s. They stay in this process, and all their batches cross "
        "the network.",
        line or errors.user_line(),
        ", or ".join(reasons),
    )


def random_parts(dataset: tf.data.Dataset) -> list[str] | None:
    """Returns what a dataset draws random numbers by, and from which seeds.

    Args:
        dataset: Made in this process, eagerly.

    Returns:
        The types of its ops that draw, with their seeds; None if one of them has no
        seed, so that each copy of the dataset draws other numbers.
    """
    serialized = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset),
        external_state_policy=_IGNORE_STATE,
    )
    graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    found = []
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
        found.append(f"{node.op} {seeds}")
    return sorted(found)


def reason(serialized: bytes) -> str:
    """Returns why a dataset has to stay; "" if it may go.

    Args:
        serialized: Its GraphDef, empty if that would be larger than TensorFlow allows.
    """
    if not serialized:
        return "holds more than 2 GB"
    return _reason(set(_types_in(tf.compat.v1.GraphDef.FromString(serialized))))


def _reason(found: set[str]) -> str:
    """Returns why a dataset of ops of these types has to stay; "" if it may go."""
    if found & _PYTHON:
        return (
            "calls Python (by from_generator, py_function or numpy_function), which "
            "only this process can"
        )
    if any(name.startswith(_STATES) for name in found):
        return "reads a variable or a table that may change"
    if _HANDLE in found:
        return "reads a table, a queue or another resource of this process"
    if "RemoteCall" in found:
        return "is copied to a device by the user"
    return ""


def _types_in(graph: Any) -> Iterable[str]:
    """Yields the types of a GraphDef's ops, those in its functions included."""
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
    """Yields the types of all ops that a tensor of a tf.Graph is made from."""
    library = {
        function.signature.name: function.node_def
        for function in tensor.graph.as_graph_def().library.function
    }
    waiting, seen = [tensor.op], {tensor.op}
    called: set[str] = set()
    while waiting:
        op = waiting.pop()
        yield op.type
        holds = any(output.dtype == tf.resource for output in op.outputs)
        if holds and not op.type.endswith(_RENEWED):
            yield _HANDLE
        yield from _types_called(op.node_def, library, called)
        above = {*op.control_inputs, *(before.op for before in op.inputs)} - seen
        seen |= above
        waiting += above


def _types_called(node: Any, library: Any, called: set[str]) -> Iterable[str]:
    """Yields the types of ops in functions that a node calls and that are not called.

    Args:
        node: The NodeDef.
        library: The nodes of each function, by its name.
        called: Names of functions that were seen; those of this node are added.
    """
    for value in node.attr.values():
        for name in (value.func.name, *(f.name for f in value.list.func)):
            if name in called or name not in library:
                continue
            called.add(name)
            for inner in library[name]:
                yield inner.op
                yield from _types_called(inner, library, called)
