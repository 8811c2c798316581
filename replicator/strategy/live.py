# SPDX-License-Identifier: Apache-2.0
"""A builder that is asked for one variable after the other, as they are created."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replicator.strategy.builder import Builder, checked
from replicator.strategy.facts import Resources, VariableFacts
from replicator.strategy.nodes import Node


class Later(BaseException):
    """A builder needs to know more than there is before the first step is built.

    A BaseException, so that the `except Exception` of a builder does not swallow it.
    """


class Asked(VariableFacts):
    """Facts of a variable that is about to be: who asks what is not known is late."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "sparse" and value is None:
            raise Later
        return value


class Live:
    """A builder, and how far it is.

    Args:
        builder: The builder.
        resources: The devices.
    """

    def __init__(self, builder: Builder, resources: Resources) -> None:
        self._builder = builder
        self._resources = resources
        self._waiting: list[VariableFacts] = []
        self._made: Iterator[Node | None] | None = None

    def ask(self, facts: VariableFacts) -> Node | None:
        """Returns what the builder says of the next variable.

        Raises:
            Later: It asks for more than is known.
            StrategyError: It says something else.
        """
        self._waiting.append(facts)
        if self._made is None:
            self._made = iter(self._builder.nodes(self._variables(), self._resources))
        return checked(self._builder, facts, next(self._made, None))

    def _variables(self) -> Iterator[VariableFacts]:
        while True:
            if not self._waiting:
                raise Later
            yield self._waiting.pop()
