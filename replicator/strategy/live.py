# SPDX-License-Identifier: Apache-2.0
"""Runs a builder one variable at a time, as variables are created."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replicator.strategy.builder import Builder, begun, following
from replicator.strategy.facts import Resources, VariableFacts
from replicator.strategy.nodes import Node


class Unknown(BaseException):
    """Raised when a builder needs facts that only the first step has.

    A BaseException, so that a builder's `except Exception` does not swallow it.
    """


class Asked(VariableFacts):
    """Facts of a variable to be created: reading an unknown one raises Unknown.

    Printing, comparing and hashing ask for nothing: a builder that logs its variables
    decides as it would without the log.
    """

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "sparse" and value is None:
            raise Unknown
        return value

    @property
    def known(self) -> VariableFacts:
        """The same facts, None where they are unknown."""
        return VariableFacts(**vars(self))

    def __repr__(self) -> str:
        return repr(self.known)

    def __eq__(self, other: object) -> bool:
        return self.known == (other.known if isinstance(other, Asked) else other)

    def __hash__(self) -> int:
        return hash(self.known)


class Live:
    """A builder in progress.

    Args:
        builder: The builder.
        resources: The devices.
    """

    def __init__(self, builder: Builder, resources: Resources) -> None:
        self._builder = builder
        self._resources = resources
        self._waiting: list[VariableFacts] = []
        self._made: Iterator[Any] | None = None

    def ask(self, facts: VariableFacts) -> Node | None:
        """Returns the builder's node for the next variable.

        Raises:
            Unknown: The builder needs facts that are not known yet.
            StrategyError: It yields something else.
        """
        self._waiting.append(facts)
        if self._made is None:
            self._made = begun(self._builder, self._variables(), self._resources)
        return following(self._builder, facts, self._made)

    def _variables(self) -> Iterator[VariableFacts]:
        while True:
            if not self._waiting:
                raise Unknown
            yield self._waiting.pop()
