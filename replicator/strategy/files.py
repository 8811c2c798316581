# SPDX-License-Identifier: Apache-2.0
"""Writes and reads strategies: as protobufs, or as JSON.

Any bytes or text either yield a strategy that its classes accept, or raise a
StrategyError that says why not.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import DecodeError

from replicator import errors
from replicator.compressors import specs
from replicator.strategy import strategy_pb2
from replicator.strategy.nodes import Node
from replicator.strategy.trials import Trial
from replicator.variables.synchronizer import (
    SPECS,
    AllReduceSynchronizer,
    PSSynchronizer,
    Synchronizer,
    error,
)

_pb: Any = strategy_pb2  # generates its classes on import
_JSON = ".json"
_MOST_COUNT = 10**6  # parts along an axis


def save(strategy: Any, path: str | os.PathLike[str]) -> None:
    """Writes a strategy; see `Strategy.save`."""
    suffix = _suffix(path)
    message = _to_message(strategy)
    try:
        message.path = os.fspath(path)
        data = message.SerializeToString()
        if suffix == _JSON:
            data = _json(message).encode()
        with open(path, "wb") as file:
            file.write(data)
    except (OSError, ValueError) as problem:
        raise error(
            f"a strategy cannot be saved as {errors.repr_of(path)}: "
            f"{errors.summary(problem)}.",
            "name a file that can be written to, in a folder that exists.",
        ) from problem


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the arguments of a saved Strategy; see `Strategy.load`."""
    suffix = _suffix(path)
    try:
        with open(path, "rb") as file:
            data = file.read()
    except (OSError, ValueError) as problem:
        raise error(
            f"a strategy cannot be loaded from {errors.repr_of(path)}: "
            f"{errors.summary(problem)}.",
            "name a file that Strategy.save has written.",
        ) from problem
    where = f"the file {os.fspath(path)}"
    fields = (from_json if suffix == _JSON else from_bytes)(data, where)
    return {**fields, "path": os.fspath(path)}


def to_bytes(strategy: Any) -> bytes:
    """Returns a strategy as a serialized protobuf."""
    return bytes(_to_message(strategy).SerializeToString())


def from_bytes(data: Any, where: str = "these bytes") -> dict[str, Any]:
    """Returns a Strategy's arguments, parsed from a serialized protobuf."""
    if not isinstance(data, bytes | bytearray):
        raise _nothing(where, f"expected bytes, not {errors.repr_of(data)}")
    if not data:
        raise _nothing(where, "it is empty")
    return _read(lambda: _pb.Strategy.FromString(bytes(data)), where)


def to_json(strategy: Any) -> str:
    """Returns a strategy as JSON."""
    return _json(_to_message(strategy))


def from_json(text: Any, where: str = "this text") -> dict[str, Any]:
    """Returns a Strategy's arguments, parsed from JSON."""

    def parse() -> Any:
        parsed = json.loads(_decoded(text, where))
        if not isinstance(parsed, dict):
            raise ValueError(f"expected a mapping, not {errors.repr_of(parsed)}")
        return json_format.ParseDict(parsed, _pb.Strategy())

    return _read(parse, where)


def _json(message: Any) -> str:
    fields = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return json.dumps(fields, indent=1)


def _suffix(path: Any) -> str:
    if not isinstance(path, str | os.PathLike):
        raise error(
            f"a strategy's file was given as {errors.repr_of(path)}.",
            "pass the path of a file.",
        )
    return os.path.splitext(os.fspath(path))[1].lower()


def _decoded(text: Any, where: str) -> str:
    if isinstance(text, bytes | bytearray):
        text = bytes(text).decode()  # a UnicodeDecodeError is a ValueError
    if not isinstance(text, str):
        raise _nothing(where, f"expected a str, not {errors.repr_of(text)}")
    return text


def _nothing(where: str, why: str) -> errors.StrategyError:
    printed = why.encode(errors="backslashreplace").decode()
    return error(
        f"there is no strategy in {where}: {printed}.",
        "correct it, or have Strategy.save write one.",
    )


def _read(parse: Callable[[], Any], where: str) -> dict[str, Any]:
    """Returns a parsed message's fields; raises StrategyError if it has no strategy."""
    with _naming(where):
        message = parse()
    try:
        return {
            "nodes": tuple(map(_node, message.node_config)),
            "replicas": tuple(message.graph_config.replicas),
            "id": message.id,
            "path": message.path,
            "trials": tuple(map(_trial, message.trials)),
        }
    except errors.StrategyError as problem:
        line = str(problem).partition("\n")[0].rstrip(".")
        raise error(f"in {where}, {line}.", "correct it, or build it again.") from None


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Turns the many errors of the parsers into StrategyErrors."""
    try:
        yield
    except errors.StrategyError:
        raise
    except (
        *(DecodeError, json_format.ParseError, ValueError, TypeError, AttributeError),
        *(RecursionError, OverflowError, KeyError, IndexError),
    ) as problem:
        raise _nothing(where, errors.summary(problem)) from problem


# --- Messages -------------------------------------------------------------------------


def _to_message(strategy: Any) -> Any:
    """Returns a strategy's message; raises for texts that are not valid UTF-8."""
    try:
        message = _pb.Strategy(id=strategy.id, path=strategy.path)
        for node in strategy.nodes:
            _fill(message.node_config.add(), node)
        message.graph_config.replicas.extend(strategy.replicas)
        for trial in strategy.trials:
            fields = {k: v for k, v in vars(trial).items() if v is not None}
            message.trials.add(**fields)
        return message
    except errors.StrategyError:
        raise
    except (ValueError, TypeError) as problem:
        raise error(
            f"a strategy cannot be written: {errors.summary(problem)}.",
            "use strings and numbers that a protobuf can hold.",
        ) from problem


def _fill(message: Any, node: Node) -> None:
    """Writes a node to its message."""
    message.var_name = node.name
    how = node.synchronizer
    if isinstance(how, PSSynchronizer):
        ps = message.PSSynchronizer
        ps.reduction_destination = how.reduction_destination
        ps.local_replication, ps.sync = how.local_replication, how.sync
        ps.staleness, ps.compressor = how.staleness, _compressor(node, how)
    elif how is not None:
        ar = message.AllReduceSynchronizer
        ar.SetInParent()
        ar.spec, ar.group = SPECS.index(how.spec), how.group
        ar.compressor = _compressor(node, how)
    message.partitioner = node.partitioner
    for part in node.parts:
        _fill(message.part_config.add(), part)
    message.sizes.extend(node.sizes)
    if node.shape is not None:
        message.shape.extend(node.shape)
        message.dtype = node.dtype
    if node.sent is not None:
        message.bytes_per_step = node.sent
    if node.seconds is not None:
        message.seconds = node.seconds


def _compressor(node: Node, how: Synchronizer) -> str:
    """Returns the text of a compressor; raises StrategyError if it has none."""
    if isinstance(how.compressor, str):
        return how.compressor
    try:
        return specs.text(specs.compressor("its node", how.compressor))
    except errors.ArgumentError as problem:
        claim = f"the strategy of variable {node.name} cannot be written"
        raise errors.StrategyError(errors.compose_with_prefix(claim, problem)) from None


def _node(message: Any) -> Node:
    """Returns the node in a message."""
    axis = _axis(message)
    has_facts = bool(message.dtype)
    return Node(
        name=message.var_name,
        synchronizer=_synchronizer(message),
        parts=tuple(map(_node, message.part_config)) if axis is not None else (),
        axis=axis,
        sizes=tuple(message.sizes) if axis is not None else (),
        shape=_shape(message) if has_facts else None,
        dtype=message.dtype,
        sent=message.bytes_per_step if message.HasField("bytes_per_step") else None,
        seconds=message.seconds if message.HasField("seconds") else None,
    )


def _trial(message: Any) -> Trial:
    return Trial(
        message.builder,
        message.strategy,
        message.predicted,
        message.measured if message.HasField("measured") else None,
        message.problem,
    )


def _synchronizer(message: Any) -> Synchronizer | None:
    kind = message.WhichOneof("synchronizer")
    if kind is None:
        return None
    how = getattr(message, kind)
    if kind == "PSSynchronizer":
        return PSSynchronizer(
            how.reduction_destination,
            how.local_replication,
            how.sync if how.HasField("sync") else True,
            how.staleness,
            how.compressor,
        )
    # Protobufs keep numbers of later versions, or of none, as they are.
    spec = SPECS[how.spec] if 0 <= how.spec < len(SPECS) else how.spec
    return AllReduceSynchronizer(spec, how.compressor, how.group)


def _shape(message: Any) -> tuple[int, ...]:
    if min(message.shape, default=0) < 0:
        raise _wrong(message, f"has the shape {list(message.shape)}", "sizes are >= 0")
    return tuple(message.shape)


def _axis(message: Any) -> int | None:
    """Returns the axis that a partitioner splits, or None."""
    text = message.partitioner
    counts = text.split(",") if text else []
    digits = all(n.isascii() and n.isdigit() and len(n) < 8 for n in counts)
    if not digits or any(not 0 < int(n) <= _MOST_COUNT for n in counts):
        raise _wrong(
            message,
            f"has the partitioner {text!r}",
            'it must count the parts of each axis, e.g. "1,2,1"',
        )
    split_axes = [axis for axis, count in enumerate(counts) if int(count) > 1]
    if len(split_axes) > 1:
        raise _wrong(
            message, f"has the partitioner {text!r}", "only one axis may have parts"
        )
    axis = split_axes[0] if split_axes else None
    parts = len(message.part_config)
    if parts != (0 if axis is None else int(counts[axis])):
        raise _wrong(
            message,
            f"has the partitioner {text!r} and {parts} parts",
            "these must agree",
        )
    if axis is None and message.sizes:
        raise _wrong(
            message, "has sizes of parts but no parts", "only parts have sizes"
        )
    return axis


def _wrong(message: Any, problem: str, fix: str) -> errors.StrategyError:
    return error(f"the node of {message.var_name!r} {problem}; {fix}.", "")
