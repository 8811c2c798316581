# SPDX-License-Identifier: Apache-2.0
"""What `run` and `build` are asked for, and the values that one call is handed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from replicator.inputs import checks, feeds, making
from replicator.inputs.given import Given, in_graph
from replicator.world import World


class Asked(NamedTuple):
    """The arguments of `Replicator.run`; see there."""

    step_fn: Callable[..., Any]
    inputs: Any = None
    input_mode: str = "per_replica"
    steps_per_call: int = 1
    args: Sequence[Any] = ()
    remainder: str = "drop"

    @property
    def by_value(self) -> bool:
        """Whether the element of a call is among its arguments: tensors or arrays."""
        return not (
            self.inputs is None
            or callable(self.inputs)
            or isinstance(self.inputs, checks.DATASETS)
        )

    @property
    def source(self) -> Any:
        """The function or the Dataset that feeds the steps, or None."""
        return None if self.by_value else self.inputs


class Handed:
    """The values that one call hands over: its element, perhaps, and its `args`.

    Attributes:
        key: Equal for values for which a step is traced once.
        leaves: The values' tensors.
        num_args: How many `args` there are.
    """

    def __init__(self, asked: Asked, args: Sequence[Any], num_local: int) -> None:
        self._mode, self.num_args = asked.input_mode, len(args)
        self._element = self._args = None
        self.key: Hashable = ()
        self.leaves: list[Any] = []
        if asked.by_value:
            self._element = Given(asked.inputs, "input_fn", num_local)
        if args:
            self._args = Given(tuple(args), "args", num_local)
        parts = [part for part in (self._element, self._args) if part is not None]
        if parts:
            self.key = tuple(part.key for part in parts)
            self.leaves = [leaf for part in parts for leaf in part.leaves]

    @property
    def is_whole(self) -> bool:
        """Whether the element is the same for all replicas, and not split."""
        whole = self._element is not None and not self._element.each
        return whole and self._mode == "per_replica"

    def stand_ins(self, current: list[Any]) -> list[Any]:
        """Adds what stands for the leaves to the function graph being traced.

        Args:
            current: Holds the leaves of a call while the function is called.
        """
        made: list[Any] = []
        for part in (self._element, self._args):
            if part is not None:
                made += part.stand_ins(len(made), current)
        return made

    def feed(self, leaves: Sequence[Any], world: World) -> feeds.Feed | None:
        """Returns what feeds the replicas the element, if it is among the values.

        Args:
            leaves: What stands for the leaves in the graph that is being built.
            world: All replicas there are, and those that are built here.
        """
        if self._element is None:
            return None
        own = in_graph(leaves[: len(self._element.leaves)])
        sources = self._element.of_each_replica(own)
        return making.values_feed(sources, world, self._mode)

    def of_one_replica(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns those of the leaves that a replica is given for itself.

        Args:
            leaves: What stands for the leaves in the graph that is being built.
        """
        own: list[Any] = []
        begin = 0
        for part in (self._element, self._args):
            if part is not None:
                own += part.of_one_replica(leaves[begin : begin + len(part.leaves)])
                begin += len(part.leaves)
        return own

    def args(self, leaves: Sequence[Any], devices: Sequence[str]) -> list[Any]:
        """Returns the further arguments of step_fn, a tuple for each replica."""
        if self._args is None:
            return [()] * len(devices)
        own = in_graph(leaves[len(leaves) - len(self._args.leaves) :])
        return [
            feeds.placed(nest, device)
            for nest, device in zip(
                self._args.of_each_replica(own), devices, strict=True
            )
        ]


NOTHING = Handed(Asked(callable), (), 0)


def handed(asked: Asked, args: Sequence[Any], num_local: int) -> Handed:
    """Returns the values of one call.

    Args:
        asked: What was asked for.
        args: Of this call, in place of those that were.
        num_local: How many replicas are built here.
    """
    if not args and not asked.by_value:
        return NOTHING
    return Handed(asked, args, num_local)
