# SPDX-License-Identifier: Apache-2.0
"""Programs that all replicas run, as plain data.

A program is a block of statements on named values, its registers, each assigned once. A
register holds one array per replica, or None on replicas without a value (such as the
non-root replicas of a `reduce`). `listing` prints a program as the step function that
runs it, `simulator` defines its result in NumPy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Names = tuple[str, ...]
Path = tuple[int, ...]  # a statement: its place, then (block, place) per level


@dataclasses.dataclass(frozen=True)
class Data:
    """Values that differ by replica.

    Attributes:
        target: The register.
        dtype: "float32", "float64" or "int32".
        shapes: `shapes[r]` is that of replica r.
        seed: The seed of the values.
        known: Whether the shape is known while the step is built.
    """

    target: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    seed: int
    known: bool = True

    def value(self, replica_id: int) -> np.ndarray:
        """Returns the replica's value."""
        random = np.random.RandomState(100 * self.seed + replica_id)
        shape = self.shapes[replica_id]
        if self.dtype == "int32":
            return random.randint(-3, 5, shape, np.int32)
        return np.asarray(random.uniform(-1, 1, shape), self.dtype)


@dataclasses.dataclass(frozen=True)
class Local:
    """Arithmetic that does not communicate: an entry of `simulator.LOCAL`."""

    target: str
    function: str
    sources: Names


@dataclasses.dataclass(frozen=True)
class Collective:
    """A call of one of the collectives.

    Attributes:
        target: The register; None on replicas that do not take part or get nothing.
        primitive: The method of Replicator.
        source: The operand.
        options: Further arguments, by name. `weight` and `splits` hold one for each
            replica, all others are the same on all.
        groups: The participants, each group separately; None: all replicas.
        spec: The dtype and shape of the TensorSpec that all but the root pass.
        owner: For "argmin" and "argmax": the register of the accompanying ids.
    """

    target: str
    primitive: str
    source: str
    options: tuple[tuple[str, Any], ...] = ()
    groups: tuple[tuple[int, ...], ...] | None = None
    spec: tuple[str, tuple[int | None, ...]] | None = None
    owner: str | None = None

    def option(self, name: str, default: Any = None) -> Any:
        """Returns an option's value."""
        return dict(self.options).get(name, default)

    def members(self, num_replicas: int) -> tuple[tuple[int, ...], ...]:
        """Returns the groups that take part."""
        return self.groups or (tuple(range(num_replicas)),)


@dataclasses.dataclass(frozen=True)
class Barrier:
    """All replicas of each group wait for one another."""

    groups: tuple[tuple[int, ...], ...] | None = None


@dataclasses.dataclass(frozen=True)
class Send:
    """Sends one replica's value to another."""

    source: str
    sender: int
    receiver: int
    tag: int


@dataclasses.dataclass(frozen=True)
class Recv:
    """The receiver takes the oldest message from the sender under the tag.

    Attributes:
        target: The register; None on all but the receiver.
        sender: The sending replica.
        receiver: The receiving replica.
        tag: The tag.
        spec: The dtype and shape of the message.
        like: A register like the message, passed in place of a TensorSpec.
    """

    target: str
    sender: int
    receiver: int
    tag: int
    spec: tuple[str, tuple[int | None, ...]]
    like: str | None = None


@dataclasses.dataclass(frozen=True)
class Block:
    """Statements, and the registers that are their results."""

    statements: tuple[Statement, ...]
    yields: Names = ()


@dataclasses.dataclass(frozen=True)
class Number:
    """A number that is the same on all replicas: 0 <= number < below.

    Attributes:
        constant: Added to the source's value.
        below: The number is taken modulo this.
        source: An int32 register; its sum is all_reduced by "max".
    """

    constant: int
    below: int
    source: str | None = None


@dataclasses.dataclass(frozen=True)
class Choose:
    """Runs one of its branches: tf.cond, or tf.switch_case."""

    targets: Names
    number: Number
    branches: tuple[Block, ...]
    switch: bool = False


@dataclasses.dataclass(frozen=True)
class Loop:
    """tf.while_loop with a number of turns; `arguments` begin as `initial`."""

    targets: Names
    number: Number
    initial: Names
    arguments: Names
    body: Block


@dataclasses.dataclass(frozen=True)
class Map:
    """tf.map_fn over the rows of `source`; `dtype` is that of the result."""

    target: str
    dtype: str
    source: str
    row: str
    body: Block


@dataclasses.dataclass(frozen=True)
class Scan:
    """tf.scan over the rows of `source`, or tf.foldl, which keeps the last only."""

    target: str
    source: str
    row: str
    initial: str
    state: str
    body: Block
    fold: bool = False


@dataclasses.dataclass(frozen=True)
class Call:
    """A tf.function, called once, or repeatedly on its own results.

    Attributes:
        targets: The registers.
        initial: The arguments of the first call.
        arguments: Their names inside, where no other registers are visible.
        body: The function's body.
        times: The number of calls.
        shared: Whether all replicas call one tf.function, made outside of the step.
    """

    targets: Names
    initial: Names
    arguments: Names
    body: Block
    times: int = 1
    shared: bool = False


Statement = (
    Data
    | Local
    | Collective
    | Barrier
    | Send
    | Recv
    | Choose
    | Loop
    | Map
    | Scan
    | Call
)


@dataclasses.dataclass(frozen=True, repr=False)
class Program:
    """A program, the same on all replicas, except for broken ones.

    Attributes:
        num_replicas: The number of replicas.
        inputs: Its first statements, the inputs.
        body: Its other statements; its results are all registers of the block.
        differentiate: "", or the way its loss is differentiated with respect to the
            floating inputs: "tape" or "tf.gradients".
        broken: (replica, body) for replicas with a body of their own.
        mode: One of helpers.MODES.
    """

    num_replicas: int
    inputs: tuple[Data, ...]
    body: Block
    differentiate: str = ""
    broken: tuple[tuple[int, Block], ...] = ()
    mode: str = "eager"

    def __repr__(self) -> str:
        from tests.spmd import listing

        return f"\n{listing.source(self)}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The text that Hypothesis prints, instead of the dataclass."""
        printer.text(repr(self))

    @property
    def watched(self) -> Names:
        """The inputs with respect to which it is differentiated."""
        floats = [x.target for x in self.inputs if x.dtype != "int32"]
        return tuple(floats) if self.differentiate else ()

    @property
    def results(self) -> Names:
        """The registers that the step returns."""
        return tuple(
            name
            for statement in (*self.inputs, *self.body.statements)
            for name in targets(statement)
            if not name.startswith("w")  # not on all replicas
        )


def targets(statement: Statement) -> Names:
    """Returns the registers that a statement assigns."""
    if isinstance(statement, Choose | Loop | Call):
        return statement.targets
    if isinstance(statement, Collective) and statement.owner:
        return statement.target, statement.owner
    return () if isinstance(statement, Send | Barrier) else (statement.target,)


def blocks(statement: Statement) -> tuple[Block, ...]:
    """Returns the blocks inside a statement."""
    if isinstance(statement, Choose):
        return statement.branches
    return (statement.body,) if isinstance(statement, Loop | Map | Scan | Call) else ()


def walk(block: Block, path: Path = ()) -> Iterator[tuple[Path, Statement]]:
    """Yields all statements of a block, to any depth, with their paths."""
    for place, statement in enumerate(block.statements):
        here = (*path, place)
        yield here, statement
        for number, inner in enumerate(blocks(statement)):
            yield from walk(inner, (*here, number))


def replace(
    block: Block, path: Path, change: Callable[[Statement], tuple[Statement, ...]]
) -> Block:
    """Returns the block with other statements in the place of the one at `path`."""
    place, *rest = path
    old = block.statements[place]
    new = change(old) if not rest else (_inside(old, tuple(rest), change),)
    statements = (*block.statements[:place], *new, *block.statements[place + 1 :])
    return dataclasses.replace(block, statements=statements)


def _inside(
    statement: Any, rest: Path, change: Callable[[Statement], tuple[Statement, ...]]
) -> Statement:
    number, *path = rest
    inner = list(blocks(statement))
    inner[number] = replace(inner[number], tuple(path), change)
    if isinstance(statement, Choose):
        return dataclasses.replace(statement, branches=tuple(inner))
    return dataclasses.replace(statement, body=inner[0])
