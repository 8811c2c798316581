# SPDX-License-Identifier: Apache-2.0
"""Rules: builders by patterns of the variables' paths."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from replicator import errors
from replicator.strategy.builder import Builder
from replicator.strategy.facts import Resources, VariableFacts
from replicator.strategy.nodes import Node, error


class Rules(Builder):
    """For each variable, what the first pattern says that is found in its path.

    Patterns are regular expressions, searched for as Keras' LayoutMap does. Each
    builder sees the variables of its pattern only. A variable for which there is no
    rule is created as without a strategy; a pattern that is found in no path is an
    error when the first step is built. A dictionary in place of a builder is this.

    Example:
        >>> repl = replicator.Replicator(["CPU:0", "CPU:1"], strategy={
        ...     r"embedding": replicator.strategy.Sharded(),
        ...     r".*kernel": replicator.strategy.AllReduce(chunk_size=16),
        ... })
        >>> with repl.context():
        ...     v = tf.Variable([[1.0]], name="embeddings")
        ...     w = tf.Variable([[2.0]], name="dense/kernel")
        >>> [x.owner for x in (v, w)]
        [0, None]

    Args:
        rules: Builders by their patterns, the first in order comes first.

    Raises:
        StrategyError: A pattern is no regular expression, or a rule is no builder.
    """

    def __init__(self, rules: Mapping[str, Builder]) -> None:
        self.rules = {_compiled(pattern): rule for pattern, rule in rules.items()}
        for pattern, rule in self.rules.items():
            if not isinstance(rule, Builder) or isinstance(rule, Rules):
                called = " Call it: a builder is an object." if _is_kind(rule) else ""
                raise error(
                    f"the rule of {pattern.pattern!r} is {errors.shown(rule)}, and no "
                    "builder.",
                    "give each pattern a builder, as replicator.strategy.Sharded()."
                    + called,
                )

    def matching(self, path: str) -> int | None:
        """Returns which rule is that of a variable, None if none is.

        Example:
            >>> rules = {"kernel": replicator.strategy.PS()}
            >>> rules = replicator.strategy.Rules(rules)
            >>> rules.matching("dense/kernel"), rules.matching("dense/bias")
            (0, None)

        Args:
            path: The variable's.
        """
        for number, pattern in enumerate(self.rules):
            if pattern.search(path):
                return number
        return None

    def missing(self, paths: Sequence[str]) -> tuple[str, ...]:
        """Returns the patterns that are found in none of some paths.

        Example:
            >>> rules = {"kernel": replicator.strategy.PS()}
            >>> replicator.strategy.Rules(rules).missing(["dense/bias"])
            ('kernel',)

        Args:
            paths: The variables there are.
        """
        return tuple(
            pattern.pattern
            for pattern in self.rules
            if not any(pattern.search(path) for path in paths)
        )

    def hidden(self, paths: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """Returns the patterns that decide on nothing, as an earlier one has it all.

        A last pattern for what is left may find nothing left: only patterns of which
        the earlier one is the more general are meant, so that their order is wrong.

        Example:
            >>> ps, sharded = replicator.strategy.PS(), replicator.strategy.Sharded()
            >>> rules = replicator.strategy.Rules({".*": ps, "kernel": sharded})
            >>> rules.hidden(["dense/kernel", "dense/bias"])
            (('kernel', '.*'),)

        Args:
            paths: The variables there are.

        Returns:
            Each with the earlier one.
        """
        patterns = list(self.rules)
        found = [{path for path in paths if p.search(path)} for p in patterns]
        return tuple(
            (patterns[later].pattern, patterns[earlier].pattern)
            for later in range(len(patterns))
            for earlier in range(later)
            if found[later] < found[earlier]
        )

    def nodes(
        self, variables: Iterable[VariableFacts], resources: Resources
    ) -> Iterator[Node | None]:
        """Yields what the rules' builders yield; see `Builder.nodes`."""
        asked = list(variables)
        made: dict[int, Node | None] = {}
        for number, builder in enumerate(self.rules.values()):
            own = [
                (n, facts)
                for n, facts in enumerate(asked)
                if self.matching(facts.path) == number
            ]
            built = builder.build([facts for _, facts in own], resources).by_name
            made.update((n, built.get(facts.path)) for n, facts in own)
        for n in range(len(asked)):
            yield made.get(n)

    def __repr__(self) -> str:
        rules = {pattern.pattern: rule for pattern, rule in self.rules.items()}
        return f"Rules({rules!r})"


def _is_kind(rule: Any) -> bool:
    return isinstance(rule, type) and issubclass(rule, Builder)


def _compiled(pattern: Any) -> re.Pattern[str]:
    try:
        made = re.compile(pattern)
        if isinstance(made.pattern, str):
            return made
        problem: Any = "it is no text"
    except (re.error, TypeError, RecursionError, OverflowError) as found:
        problem = errors.told(found)
    raise error(
        f"the pattern {errors.shown(pattern)} is no regular expression: {problem}.",
        "write it as for re.search; a point in a path is written \\.",
    )
