# SPDX-License-Identifier: Apache-2.0
"""The arguments of `run` and `build`, and the values passed to one call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from replicator.inputs import checks, feed_factory, feeds
from replicator.inputs.call_values import CallValues, in_graph
from replicator.world import World


class Request(NamedTuple):
    """The arguments of `Replicator.run`; see there."""

    step_fn: Callable[..., Any]
    inputs: Any = None
    input_mode: str = "per_replica"
    steps_per_call: int = 1
    args: Sequence[Any] = ()
    remainder: str = "drop"

    @property
    def by_value(self) -> bool:
        """Whether the element is passed to each call, as tensors or arrays."""
        return not (
            self.inputs is None
            or callable(self.inputs)
            or isinstance(self.inputs, checks.DATASETS)
        )

    @property
    def source(self) -> Any:
        """The function or Dataset that feeds the steps, or None."""
        return None if self.by_value else self.inputs

    def arguments_of(self, args: Sequence[Any], num_local: int) -> CallArguments:
        """Returns the values of one call.

        Args:
            args: The `args` of this call, in place of those of the step.
            num_local: The number of replicas built here.
        """
        if not args and not self.by_value:
            return NO_ARGUMENTS
        return CallArguments(self, args, num_local)


class CallArguments:
    """The values passed to one call: its element, if passed by value, and its `args`.

    Attributes:
        key: Equal for values that share a trace of the step.
        leaves: The tensors of the values.
        num_args: The number of `args`.
    """

    def __init__(self, request: Request, args: Sequence[Any], num_local: int) -> None:
        self._mode, self.num_args = request.input_mode, len(args)
        self._element = self._args = None
        self.key: Hashable = ()
        self.leaves: list[Any] = []
        if request.by_value:
            self._element = CallValues(request.inputs, "input_fn", num_local)
            if self._element.has_per_replica and request.input_mode == "global_batch":
                raise checks.not_one_batch("the inputs hold")
        if args:
            self._args = CallValues(tuple(args), "args", num_local)
        parts = [part for part in (self._element, self._args) if part is not None]
        if parts:
            self.key = tuple(part.key for part in parts)
            self.leaves = [leaf for part in parts for leaf in part.leaves]

    @property
    def is_whole(self) -> bool:
        """Whether every replica gets the whole element, rather than a part of it."""
        is_undivided = self._element is not None and not self._element.has_per_replica
        return is_undivided and self._mode == "per_replica"

    def placeholders(self, current: list[Any]) -> list[Any]:
        """Adds placeholders for the leaves to the function graph being traced.

        Args:
            current: Holds the leaves of a call while the function is called.
        """
        placeholders: list[Any] = []
        for part in (self._element, self._args):
            if part is not None:
                placeholders += part.placeholders(len(placeholders), current)
        return placeholders

    def feed(self, leaves: Sequence[Any], world: World) -> feeds.Feed | None:
        """Returns a feed of the element to the replicas, if it is passed by value.

        Args:
            leaves: The tensors of the leaves in the graph being built.
            world: All replicas, and which of them are built here.
        """
        if self._element is None:
            return None
        element_leaves = in_graph(leaves[: len(self._element.leaves)])
        sources = self._element.of_each_replica(element_leaves)
        return feed_factory.values_feed(sources, world, self._mode)

    def of_one_replica(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the leaves that belong to one replica only.

        Args:
            leaves: The tensors of the leaves in the graph being built.
        """
        own_leaves: list[Any] = []
        begin = 0
        for part in (self._element, self._args):
            if part is not None:
                own_leaves += part.of_one_replica(
                    leaves[begin : begin + len(part.leaves)]
                )
                begin += len(part.leaves)
        return own_leaves

    def of_all_replicas(self) -> list[Any]:
        """Returns the values of the call that every replica gets, or a part of each."""
        of_one = {id(leaf) for leaf in self.of_one_replica(self.leaves)}
        return [leaf for leaf in self.leaves if id(leaf) not in of_one]

    def args(self, leaves: Sequence[Any], devices: Sequence[str]) -> list[Any]:
        """Returns the further arguments of step_fn, a tuple for each replica."""
        if self._args is None:
            return [()] * len(devices)
        arg_leaves = in_graph(leaves[len(leaves) - len(self._args.leaves) :])
        return [
            feeds.placed(nest, device)
            for nest, device in zip(
                self._args.of_each_replica(arg_leaves), devices, strict=True
            )
        ]


NO_ARGUMENTS = CallArguments(Request(callable), (), 0)
