# SPDX-License-Identifier: Apache-2.0
"""The passes that build a step, in order: PASSES.

Each takes the draft of the step and leaves in it what later ones need. A new pass is a
function of a Draft, in a file of this package, and a line in the list; its changes to
the graph are implemented in a file of graph/.
"""

from __future__ import annotations

from collections.abc import Callable

from replicator.graph.passes import pulls
from replicator.inputs import checks as input_checks
from replicator.stages.writing import Recorder
from replicator.step import stages
from replicator.step.calling import (
    call_step_fn,
    check_results,
    copy_replicas,
    divide_ops,
    pull_inputs,
)
from replicator.step.communicating import (
    join_calls,
    lower,
    read_once,
    transpose_products,
)
from replicator.step.comparing import (
    answer_messages,
    check_effects,
    check_equality,
    check_origins,
)
from replicator.step.deciding import follow_strategy, note_undecided
from replicator.step.draft import BuiltStep, Draft
from replicator.step.finishing import (
    check_initialized,
    check_leftovers,
    order_effects,
    seal_results,
)

PASSES: tuple[Callable[[Draft], None], ...] = (
    note_undecided,
    pull_inputs,
    call_step_fn,
    follow_strategy,
    check_results,
    divide_ops,
    join_calls,
    copy_replicas,
    check_effects,
    check_origins,
    answer_messages,
    check_equality,
    lower,
    read_once,
    transpose_products,
    order_effects,
    seal_results,
    check_initialized,
    check_leftovers,
)
# What records the step after some of the passes; see `Replicator.stages`.
_STAGES: dict[Callable[[Draft], None], Callable[[Recorder, Draft], None]] = {
    divide_ops: stages.traced,
    copy_replicas: stages.copied,
    check_leftovers: stages.finish,
}


def run(draft: Draft) -> BuiltStep:
    """Builds a step by running all passes."""
    name = input_checks.name_of(draft.step_fn)
    line = stages.line_of(draft.step_fn)
    recordings = [recorder.begin(name, line) for recorder in draft.settings.stages]
    for apply in PASSES:
        apply(draft)
        for recording in recordings:
            if apply in _STAGES:
                _STAGES[apply](recording, draft)
    used = {
        id(variable): variable for variable in draft.build.aliases.recorded().values()
    }
    variables = tuple(used.values())
    build = draft.build
    pulled = pulls.nbytes(
        variables, build.graph, build.world, draft.leaves(), draft.pruned
    )
    return BuiltStep(
        draft.returned, draft.communications, variables, draft.writes, pulled
    )
