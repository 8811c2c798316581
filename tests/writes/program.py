# SPDX-License-Identifier: Apache-2.0
"""Programs that write variables, as text, with their known effects.

A program is a list of statements on a few variables. Each statement has its lines of
Python, whether it must be accepted or refused, and, if simple, its effect on the
variables in NumPy. Nothing here uses the library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

SIZE = 3  # elements of each variable, and of each replica's input
RIGHT = "right"  # must be accepted
OPEN = "open"  # accepted or refused
WRONG = "wrong"  # must be refused
Values = list[np.ndarray]  # one per replica


@dataclasses.dataclass(frozen=True)
class Variable:
    """A variable.

    Attributes:
        name: The name in the text of the program.
        dtype: "float32", "int32" or "bool".
        aggregation: A name in tf.VariableAggregation.
        on_read: Whether each replica has its own value.
    """

    name: str
    dtype: str
    aggregation: str
    on_read: bool

    @property
    def initial(self) -> np.ndarray:
        """Returns its initial value, outside of steps."""
        number = int(self.name[1:])
        return (np.arange(SIZE) + number).astype(self.dtype)

    @property
    def line(self) -> str:
        """Returns the line that makes it."""
        when = ", synchronization=tf.VariableSynchronization.ON_READ"
        return (
            f"{self.name} = tf.Variable({self.initial.tolist()}, name={self.name!r}, "
            f"dtype=tf.{self.dtype}, "
            f"aggregation=tf.VariableAggregation.{self.aggregation}"
            f"{when if self.on_read else ''})"
        )

    def own(self, num_replicas: int) -> Values:
        """Returns the initial values of the replicas' components."""
        others = self.initial
        if self.on_read and self.aggregation == "SUM":
            others = np.zeros_like(others)
        return [self.initial] + [others] * (num_replicas - 1)

    def agreed(self, values: Values) -> Values:
        """Returns the agreed value that replicas assign instead of their own."""
        if self.on_read or self.dtype != "float32" and self.aggregation == "NONE":
            return values
        if self.aggregation == "ONLY_FIRST_REPLICA":
            one = values[0]
        else:
            one = sum(values[1:], values[0])
            if self.aggregation != "SUM":
                one = one / len(values)
        return [one.astype(self.dtype)] * len(values)


@dataclasses.dataclass
class State:
    """The values of variables and of the input; None where unknown.

    Attributes:
        held: `held[name][r]` is the value on replica r.
        x: `x[r]` is the input of replica r.
    """

    held: dict[str, Values | None]
    x: Values

    @property
    def everyone(self) -> range:
        """The replicas."""
        return range(len(self.x))

    def forget(self, variables: Iterable[Variable]) -> None:
        """Makes the values of variables unknown."""
        self.held.update(dict.fromkeys((v.name for v in variables), None))


@dataclasses.dataclass(frozen=True)
class Expression:
    """A value that a statement writes.

    Attributes:
        text: The expression.
        equal: Whether it is equal on all replicas by construction.
        silent: Whether it is computed without communication.
        value: Its value on each replica; None where unknown.
    """

    text: str
    equal: bool
    silent: bool
    value: Callable[[State], Values | None]


@dataclasses.dataclass(frozen=True)
class Statement:
    """A statement.

    Attributes:
        lines: Its lines.
        verdict: RIGHT, OPEN or WRONG.
        writes: The variables that it writes.
        effect: Applies its effect to the state; None where unknown.
        setup: Lines that come before the step, under the context.
    """

    lines: tuple[str, ...]
    verdict: str
    writes: tuple[Variable, ...]
    effect: Callable[[State], None] | None = None
    setup: tuple[str, ...] = ()

    def act(self, state: State) -> None:
        """Applies the statement's effect to the state."""
        if self.effect is None:
            state.forget(self.writes)
        else:
            self.effect(state)


def verdict(statements: Iterable[Statement]) -> str:
    """Returns the combined verdict on several statements."""
    verdicts = {statement.verdict for statement in statements}
    return next((x for x in (WRONG, OPEN) if x in verdicts), RIGHT)


@dataclasses.dataclass(frozen=True, repr=False)
class Program:
    """A program, and how it is run.

    Attributes:
        num_replicas: The number of replicas.
        mode: One of helpers.MODES.
        options: Of Replicator.
        variables: Its variables.
        statements: The body of a step.
    """

    num_replicas: int
    mode: str
    options: tuple[tuple[str, object], ...]
    variables: tuple[Variable, ...]
    statements: tuple[Statement, ...]

    def __repr__(self) -> str:
        return f"\n{self.text}"

    def _repr_pretty_(self, printer: object, cycle: bool) -> None:
        """The text that Hypothesis prints, instead of the dataclass."""
        printer.text(repr(self))  # type: ignore[attr-defined]

    @property
    def verdict(self) -> str:
        """The expected outcome."""
        return verdict(self.statements)

    @property
    def text(self) -> str:
        """The function that makes variables and optimizers, and returns the step."""
        made = [variable.line for variable in self.variables]
        made += [line for statement in self.statements for line in statement.setup]
        step = [line for statement in self.statements for line in statement.lines]
        names = ", ".join(variable.name for variable in self.variables)
        lines = [
            f"# {self.num_replicas} replicas, {self.mode}, {dict(self.options)}, "
            f"{self.verdict}",
            "def make_step():",
            *indented(made),
            "",
            "    def step_fn(x):",
            *indented(indented(step)),
            "        return tf.reduce_sum(x)",
            "",
            f"    return step_fn, [{names}]",
        ]
        return "\n".join([*lines, ""])

    def inputs(self, replica_id: int, steps: int) -> np.ndarray:
        """Returns a replica's inputs: [steps, SIZE]."""
        random = np.random.RandomState(replica_id)
        return (random.randint(1, 9, [steps, SIZE]) / 8).astype(np.float32)

    def simulate(self, steps: int) -> dict[str, Values | None]:
        """Returns the final values of the components; None where unknown."""
        fed = [self.inputs(r, steps) for r in range(self.num_replicas)]
        state = State({v.name: v.own(self.num_replicas) for v in self.variables}, [])
        for k in range(steps):
            state.x = [rows[k] for rows in fed]
            for statement in self.statements:
                statement.act(state)
        return state.held


def indented(lines: Iterable[str]) -> list[str]:
    """Returns lines, indented once more."""
    return ["    " + line if line else line for line in lines]
