"""Where in the control flow a communication call stands.

Communication inside conditionals, loops and nested functions needs the replicas' ops
to be merged (DESIGN, section 5). Until that is built, such a call is refused here, by
line, before anything is added to the graph.
"""

from __future__ import annotations

import tensorflow as tf

from replicator import _tf, errors


def refuse_nested(graph: tf.Graph, built: tf.Graph, what: str, line: str) -> None:
    """Raises unless a call stands at the top level of the step.

    Args:
        graph: The graph that ops are being added to.
        built: The graph that the step is built into.
        what: The call, e.g. "all_reduce on replica 0".
        line: The user's line.

    Raises:
        ReplicatorError: The call stands inside a cond, a loop or a nested function.
    """
    lifted = tf.executing_eagerly()  # in a tf.init_scope
    if graph is built and not lifted and not _tf.in_v1_control_flow(graph):
        return
    inside = getattr(graph, "name", "") or "a conditional or a loop"
    if lifted:
        inside = "tf.init_scope"
    raise errors.ReplicatorError(
        errors.compose(
            f"{what} stands inside control flow or a nested function ({inside}), where "
            "communication is not supported yet.",
            [f"at {line}"],
            "communicate before or after it, at the top level of the step, and hand "
            "the tensors in or out; decorate the step itself rather than a part of it.",
        )
    )
