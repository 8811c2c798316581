# SPDX-License-Identifier: Apache-2.0
"""Chooses variables' placements by a strategy, at creation or at the first step."""

from __future__ import annotations

import dataclasses
import os
import re
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.strategy import compiled, predictions
from replicator.strategy.builder import Builder
from replicator.strategy.builders.auto import Auto
from replicator.strategy.builders.fixed import Fixed
from replicator.strategy.description import Strategy
from replicator.strategy.facts import Resources, VariableFacts
from replicator.strategy.live import Asked, Live, Unknown
from replicator.strategy.nodes import Node
from replicator.strategy.predictions import Assumed
from replicator.strategy.rules import Rules
from replicator.variables.chooser import Description, Later
from replicator.variables.default_placement import VARIABLES
from replicator.variables.synchronizer import error
from replicator.world import World


def as_builder(strategy: Any) -> Builder:
    """Converts the `strategy` argument of Replicator to a builder.

    Args:
        strategy: A builder, a dictionary of rules, a Strategy, or the path of a saved
            one.

    Raises:
        StrategyError: It is none of them.
    """
    if isinstance(strategy, Builder):
        return strategy
    if isinstance(strategy, Strategy):
        return Fixed(strategy)
    if isinstance(strategy, str | os.PathLike):
        _refuse_name(strategy)
        return Fixed(Strategy.load(strategy))
    if isinstance(strategy, Mapping):
        return Rules(strategy)
    hint = ""
    if isinstance(strategy, type) and issubclass(strategy, Builder):
        hint = f" Call it: strategy={strategy.__name__}()."
    raise error(
        f"Replicator was given strategy={errors.repr_of(strategy)}.",
        "pass a builder, e.g. replicator.strategy.PSLoadBalancing(); a dictionary from "
        "patterns to builders; a Strategy; or the path of a saved one." + hint,
    )


def _refuse_name(path: str | os.PathLike[str]) -> None:
    """Raises StrategyError for a builder's name or a value of `variables`."""
    if os.path.exists(path):
        return
    fix = ""
    if str(path) in set(_names(Builder)):
        fix = f"pass the builder, strategy=replicator.strategy.{path}()."
    elif path in VARIABLES:
        fix = f"pass variables={path!r}, or a builder, e.g. replicator.strategy.Auto()."
    if fix:
        raise error(
            f"Replicator was given strategy={errors.repr_of(path)}, and there is no "
            "file "
            "of that name.",
            fix,
        )


def _names(kind: type[Builder]) -> Iterator[str]:
    for subclass in kind.__subclasses__():
        yield subclass.__name__
        yield from _names(subclass)


def in_force(
    variables: Mapping[str, Any],
    resources: Resources,
    chooser: StrategyChooser | None = None,
) -> Strategy:
    """Returns the strategy that variables currently follow.

    Args:
        variables: ReplicatedVariables, by their paths.
        resources: The devices.
        chooser: Knows which gradients are sparse, once a step has been built.
    """
    nodes = [compiled.described(*item) for item in variables.items()]
    known = [
        (False, Assumed()) if chooser is None else chooser.run.known(path)
        for path in variables
    ]
    nodes = predictions.predicted_together(nodes, resources, known)
    return Strategy(tuple(nodes), resources.devices)


@dataclasses.dataclass
class _Rule:
    """The progress of one builder.

    Attributes:
        builder: The builder.
        live: Asks it for one variable after the other; None once it has chosen to
            decide later.
        asked: The variables that it was asked for.
    """

    builder: Builder
    live: Live | None
    asked: list[VariableFacts] = dataclasses.field(default_factory=list)


class Run:
    """The decisions for the variables of one graph, or for the eager ones."""

    def __init__(self, strategy: Builder, resources: Resources, world: World) -> None:
        self._strategy, self._resources, self._world = strategy, resources, world
        rules = list(strategy.rules.values()) if isinstance(strategy, Rules) else []
        self._rules = [_Rule(b, Live(b, resources)) for b in rules or [strategy]]
        self._paths: list[str] = []
        self.sparse: dict[str, bool] = {}  # whether gradients are sparse, where known
        self.assumed: dict[str, Assumed] = {}  # what predictions assume, by variable
        self._checked = False

    def choose(self, facts: VariableFacts) -> Description | Later | None:
        """Returns the choice for a variable; None if the strategy leaves it alone."""
        rule = self._asked_of(facts)
        if rule is None:
            return None
        node = None
        if rule.live is not None:
            try:
                node = rule.live.ask(Asked(**dataclasses.asdict(facts)))
            except Unknown:
                rule.live = None
        if rule.live is None:
            return Later(rule.builder.may_divide)
        return self._compiled(node, facts)

    def choose_all(self, variables: Sequence[VariableFacts]) -> dict[str, Description]:
        """Returns the choices for variables whose facts are all known, by path.

        Raises:
            StrategyError: A rule matches no variable.
        """
        choices: dict[str, Description] = {}
        for facts in variables:
            self._asked_of(facts)
            self.sparse[facts.path] = bool(facts.sparse)
        for rule in self._rules:
            strategy = rule.builder.build(rule.asked, self._resources)
            for facts in rule.asked:
                chosen = self._compiled(strategy.by_name.get(facts.path), facts)
                if chosen is not None:
                    choices[facts.path] = chosen
        self.check()
        return choices

    def _asked_of(self, facts: VariableFacts) -> _Rule | None:
        """Returns the rule of a variable, after adding the variable to it."""
        self._paths.append(facts.path)
        number: int | None = 0
        if isinstance(self._strategy, Rules):
            number = self._strategy.matching(facts.path)
        if number is None:
            return None
        rule = self._rules[number]
        rule.asked.append(facts)
        if isinstance(rule.builder, Auto):
            self.assumed[facts.path] = rule.builder.assumed
        return rule

    def _compiled(self, node: Node | None, facts: VariableFacts) -> Description | None:
        return None if node is None else compiled.description(node, facts, self._world)

    def decide(self, undecided: Collection[str]) -> dict[str, Description | None]:
        """Decides on the variables whose facts are now sufficient.

        Args:
            undecided: The paths of variables that were created before a decision.

        Returns:
            The choices, by path; None: as without a strategy.
        """
        choices: dict[str, Description | None] = {}
        for rule in self._rules:
            waiting = [facts for facts in rule.asked if facts.path in undecided]
            nodes = self._built(rule, undecided) if waiting else {}
            for facts in waiting:
                if facts.path in nodes:
                    choices[facts.path] = self._compiled(nodes[facts.path], facts)
        return choices

    def _built(self, rule: _Rule, undecided: Collection[str]) -> dict[str, Node | None]:
        """Returns a builder's nodes for all variables that it can decide on now."""
        all_facts = [
            self._asked(facts, facts.path in undecided) for facts in rule.asked
        ]
        with_layout = [facts for facts in all_facts if facts.path in self.sparse]
        for subset in (all_facts, with_layout):
            try:
                strategy = rule.builder.build(subset, self._resources)
            except Unknown:
                continue
            return {facts.path: strategy.node(facts.path) for facts in subset}
        return {}

    def _asked(self, facts: VariableFacts, whole: bool) -> Asked:
        updates = {"sparse": self.sparse.get(facts.path), "whole": whole}
        return Asked(**{**dataclasses.asdict(facts), **updates})

    def known(self, path: str) -> tuple[bool, Assumed]:
        """Returns whether a variable's gradient is sparse, and the assumptions."""
        return self.sparse.get(path, False), self.assumed.get(path, Assumed())

    def check(self) -> None:
        """Raises StrategyError, once, if a rule matches no variable."""
        if self._checked or not self._paths:
            return
        self._checked = True
        missing = self._strategy.missing(self._paths)
        if missing:
            shown = ", ".join(map(repr, missing[:_MOST_SHOWN]))
            raise error(
                f"the strategy has rules for variables that do not exist: {shown}.",
                "correct or remove them; a pattern is searched for in paths.",
                [f"there is {path}" for path in _some(self._paths)],
            )
        if isinstance(self._strategy, Rules):
            self._refuse_hidden(self._strategy)

    def _refuse_hidden(self, rules: Rules) -> None:
        """Raises StrategyError if an earlier rule hides another rule entirely."""
        hidden = rules.hidden(self._paths)
        if hidden:
            later, earlier = hidden[0]
            matches = [path for path in self._paths if re.search(later, path)]
            raise error(
                f"the rule of {later!r} never applies: the first pattern that is found "
                f"in a path decides, and {earlier!r}, which comes before it, is found "
                "in all of its paths and in more.",
                "put the more general pattern last, or remove the other one.",
                [f"both are found in {path}" for path in _some(matches)],
            )


_MOST_SHOWN = 20


def _some(paths: Sequence[str]) -> list[str]:
    more = len(paths) - _MOST_SHOWN
    return [*paths[:_MOST_SHOWN], *([f"... and {more} more"] if more > 0 else [])]


class StrategyChooser:
    """Chooses placements by a builder, on request of the variables' factory.

    Each tf.Graph has its own variables, so the builder starts anew for each.

    Args:
        strategy: The builder.
        resources: The devices.
        world: The replicas.
    """

    def __init__(self, strategy: Builder, resources: Resources, world: World) -> None:
        self._begin = lambda: Run(strategy, resources, world)
        self._eager = self._begin()
        self._graphs: weakref.WeakKeyDictionary[tf.Graph, Run]
        self._graphs = weakref.WeakKeyDictionary()

    @property
    def run(self) -> Run:
        """The decisions for the variables of the current graph, or the eager ones."""
        with tf.init_scope():
            if tf.executing_eagerly():
                return self._eager
            graph = tf.compat.v1.get_default_graph()
            return self._graphs.get(graph) or self.begin()

    def begin(self) -> Run:
        """Begins anew for the variables of the default graph."""
        run = self._graphs[tf.compat.v1.get_default_graph()] = self._begin()
        return run

    def choose(self, facts: VariableFacts) -> Description | Later | None:
        """Returns the choice for a variable that is about to be created."""
        return self.run.choose(facts)
