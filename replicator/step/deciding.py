# SPDX-License-Identifier: Apache-2.0
"""Passes in which a strategy decides on variables that exist already."""

from __future__ import annotations

from replicator import context
from replicator.step.draft import Draft
from replicator.variables import decisions
from replicator.variables.chooser import SparseGradients


def note_undecided(draft: Draft) -> None:
    """Records where earlier code uses variables that await a strategy's decision."""
    if draft.settings.chooser is not None:
        trained = draft.settings.factory.trained().items()
        draft.settled = {
            path: storage.settlement
            for path, variable in trained
            if (storage := decisions.undecided(variable)) is not None
        }


def follow_strategy(draft: Draft) -> None:
    """Applies a strategy's decisions on variables that it could not decide on before.

    Raises:
        BuildAgain: Some have moved, or are kept equal in another way.
        StrategyError: A rule of the strategy matches no variable.
    """
    chooser = draft.settings.chooser
    if chooser is None:
        return
    run = chooser.run
    run.check()
    factory = draft.settings.factory
    variables = factory.trained()
    sparse = draft.build.states.of(SparseGradients)
    run.sparse |= {p: sparse[v.key] for p, v in variables.items() if v.key in sparse}
    undecided = set()
    for path, variable in variables.items():
        storage = decisions.undecided(variable)
        if storage is not None:
            undecided.add(path)
            # An optimizer has read it to create its slots, but only in this step.
            storage.settlement = draft.settled.get(path)
    changed = [
        path
        for path, decision in run.decide(undecided).items()
        if decisions.follow(factory.divide_again, variables[path], decision)
    ]
    if changed:
        draft.build.knowledge.update({("decided", path): True for path in changed})
        raise context.BuildAgain
