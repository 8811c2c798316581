# SPDX-License-Identifier: Apache-2.0
"""Rules: builders by patterns of variables' paths."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from replicator import errors
from replicator.strategy.builder import Builder
from replicator.strategy.facts import Resources, VariableFacts
from replicator.strategy.nodes import Node
from replicator.variables.synchronizer import error


class Rules(Builder):
    """Applies to each variable the builder of the first pattern found in its path.

    Patterns are regular expressions, searched for as in Keras' LayoutMap. Each builder
    sees only the variables of its pattern. A variable without a rule is created as
    without a strategy; a pattern found in no path is an error when the first step is
    built. A dictionary in place of a builder stands for Rules.

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
        rules: Builders by their patterns, in order of precedence.

    Raises:
        StrategyError: A pattern is not a regular expression, or a rule is not a
            builder.
    """

    def __init__(self, rules: Mapping[str, Builder]) -> None:
        self.rules = {_compiled(pattern): rule for pattern, rule in rules.items()}
        for pattern, rule in self.rules.items():
            if not isinstance(rule, Builder) or isinstance(rule, Rules):
                hint = " Call it: a builder is an object." if _is_kind(rule) else ""
                raise error(
                    f"the rule of {pattern.pattern!r} is {errors.repr_of(rule)}, which "
                    "is not a builder.",
                    "give each pattern a builder, e.g. replicator.strategy.Sharded()."
                    + hint,
                )

    def matching(self, path: str) -> int | None:
        """Returns the number of the rule that a variable follows, or None.

        Example:
            >>> rules = {"kernel": replicator.strategy.PS()}
            >>> rules = replicator.strategy.Rules(rules)
            >>> rules.matching("dense/kernel"), rules.matching("dense/bias")
            (0, None)

        Args:
            path: The variable's path.
        """
        for number, pattern in enumerate(self.rules):
            if pattern.search(path):
                return number
        return None

    def missing(self, paths: Sequence[str]) -> tuple[str, ...]:
        """Returns the patterns that are found in none of the paths.

        Example:
            >>> rules = {"kernel": replicator.strategy.PS()}
            >>> replicator.strategy.Rules(rules).missing(["dense/bias"])
            ('kernel',)

        Args:
            paths: The paths of all variables.
        """
        return tuple(
            pattern.pattern
            for pattern in self.rules
            if not any(pattern.search(path) for path in paths)
        )

    def hidden(self, paths: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """Returns the patterns that an earlier, more general one hides entirely.

        A final pattern for the rest may find nothing left: only patterns that find
        fewer paths than the earlier one count, since their order must be wrong.

        Example:
            >>> ps, sharded = replicator.strategy.PS(), replicator.strategy.Sharded()
            >>> rules = replicator.strategy.Rules({".*": ps, "kernel": sharded})
            >>> rules.hidden(["dense/kernel", "dense/bias"])
            (('kernel', '.*'),)

        Args:
            paths: The paths of all variables.

        Returns:
            Each hidden pattern with the earlier one.
        """
        patterns = list(self.rules)
        matches = [{path for path in paths if p.search(path)} for p in patterns]
        return tuple(
            (patterns[later].pattern, patterns[earlier].pattern)
            for later in range(len(patterns))
            for earlier in range(later)
            if matches[later] < matches[earlier]
        )

    def nodes(
        self, variables: Iterable[VariableFacts], resources: Resources
    ) -> Iterator[Node | None]:
        """Yields the nodes of the rules' builders; see `Builder.nodes`."""
        all_facts = list(variables)
        nodes: dict[int, Node | None] = {}
        for number, builder in enumerate(self.rules.values()):
            matches = [
                (n, facts)
                for n, facts in enumerate(all_facts)
                if self.matching(facts.path) == number
            ]
            by_path = builder.build([facts for _, facts in matches], resources).by_name
            nodes.update((n, by_path.get(facts.path)) for n, facts in matches)
        for n in range(len(all_facts)):
            yield nodes.get(n)

    def __repr__(self) -> str:
        rules = {pattern.pattern: rule for pattern, rule in self.rules.items()}
        return f"Rules({rules!r})"


def _is_kind(rule: Any) -> bool:
    return isinstance(rule, type) and issubclass(rule, Builder)


def _compiled(pattern: Any) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
        if isinstance(compiled.pattern, str):
            return compiled
        problem: Any = "it is not a str"
    except (re.error, TypeError, RecursionError, OverflowError) as failure:
        problem = errors.summary(failure)
    raise error(
        f"the pattern {errors.repr_of(pattern)} is not a regular expression: "
        f"{problem}.",
        "write it as for re.search, with \\. for a dot in a path.",
    )
