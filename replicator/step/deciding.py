# SPDX-License-Identifier: Apache-2.0
"""Passes in which a strategy decides on variables that exist already."""

from __future__ import annotations

from replicator import context
from replicator.step.draft import Draft
from replicator.variables import following
from replicator.variables.chooser import SparseGradients


def note_undecided(draft: Draft) -> None:
    """Records where earlier code uses variables that await a strategy's decision."""
    if draft.settings.chooser is not None:
        trained = draft.settings.factory.trained().items()
        draft.settled = {
            path: following.undecided(variable)[0].storage.settlement
            for path, variable in trained
            if following.undecided(variable)
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
    chooser.check()
    factory = draft.settings.factory
    variables = factory.trained()
    sparse = draft.build.states.of(SparseGradients)
    sparse_by_path = {p: sparse[v.key] for p, v in variables.items() if v.key in sparse}
    chooser.learn(sparse_by_path)
    if not chooser.undecided:
        return
    for path, variable in variables.items():
        for undecided_variable in following.undecided(variable):
            # An optimizer has read it to create its slots, but only in this step.
            undecided_variable.storage.settlement = draft.settled.get(path)
    decided = chooser.decide()
    changed = [
        path
        for path, decision in decided.items()
        if path in variables and following.follow(factory, variables[path], decision)
    ]
    chooser.followed()
    if changed:
        draft.build.knowledge.update({("decided", path): True for path in changed})
        raise context.BuildAgain
