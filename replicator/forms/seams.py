# SPDX-License-Identifier: Apache-2.0
"""What the engine asks of the library. STAND-INS: to be replaced by the library's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, context
from replicator.variables import copies
from replicator.variables.partitioned import PartitionedVariable
from replicator.variables.replicated import ReplicatedVariable


@contextlib.contextmanager
def seen_as_one() -> Iterator[None]:
    """Makes each of the library's variables one plain variable, in traces in this block."""
    plain = _tf.HandleVariable
    same = ("_read_variable_op", "sparse_read", "gather_nd", "_lazy_read")
    members: dict[str, Any] = {name: getattr(plain, name) for name in same}
    members["handle"] = property(lambda self: self._handle)
    members["_write"] = lambda self, method, value, name, read_value: getattr(plain, method)(
        self, value, name=name, read_value=read_value
    )
    members["_write_piece"] = lambda self, method, *args, **options: getattr(plain, method)(
        self, *args, **options
    )
    kinds = (ReplicatedVariable, PartitionedVariable)
    before = [(kind, name, vars(kind).get(name)) for kind in kinds for name in members]
    try:
        for kind in kinds:
            for name, member in members.items():
                setattr(kind, name, member)
        yield
    finally:
        for kind, name, member in before:
            if member is None:
                delattr(kind, name)
            else:
                setattr(kind, name, member)


@contextlib.contextmanager
def writing(variables: Sequence[Any]) -> Iterator[None]:
    """Makes writes in this block equal on all replicas, by their form."""
    replica = context.require("a write")
    with replica.equal_updates("a function for one device"), replica.build.ledger.agreed():
        yield
    # Writes of an optimizer leave the replicas' copies of an owner's variable behind.
    copies.refresh([p for v in variables for p in getattr(v, "parts", [v])], replica)
