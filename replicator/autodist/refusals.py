# SPDX-License-Identifier: Apache-2.0
"""Errors for single-device programs that cannot be replicated, in users' terms."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from replicator import errors


def of_user(error: errors.ReplicatorError, scope: str) -> errors.ReplicatorError:
    """Rewords an error of the passes for users who know of no replicas."""
    said = str(error).replace(f"{scope}/", "").partition("\nFix: ")[0]
    fix = (
        "compute the written value from gradients of tf.gradients, from variables and "
        "from values fed whole to every replica; or write it with assign, assign_add "
        "or assign_sub outside conditionals and loops, which makes it equal."
    )
    return errors.UnsupportedError(errors.compose(said, [], fix))


def unsplit(what: str, error: errors.ReplicatorError) -> str:
    """Returns the warning that each replica computes whole batches, and why."""
    said, _, fix = str(error).partition("\nFix: ")
    return errors.compose(
        f"{what} is not split: each replica computes the whole batch, as one device "
        f"would, and takes as long. Reason: {said}",
        fix=fix,
    )


def unbuildable(
    whys: Mapping[str, str], lines: Mapping[str, str]
) -> errors.ReplicatorError:
    """Returns the error for owned variables that cannot be mirrored either.

    Args:
        whys: Maps the names of variables to why each replica needs a component.
        lines: Where the variables were created.
    """
    names = ", ".join(whys)
    return errors.UnsupportedError(
        errors.compose(
            f"variable {names}, which one replica owns, is used in a way that needs a "
            "component on each replica.",
            [f"{name}, {why}, created at {lines[name]}" for name, why in whys.items()],
            'use a strategy that mirrors it, strategy="mirrored".',
        )
    )


def no_whole(variable: str, line: str, said: str) -> errors.ReplicatorError:
    """Returns the error for a differing write that has no value for all examples."""
    return errors.UnsupportedError(
        errors.compose(
            f"variable {variable} is assigned a value that differs between "
            f"replicas and is unknown for all examples: it is {said}.",
            [f"at {line}"],
            "assign a value that does not depend on the examples, or that is computed "
            "from means, sums, maxima and minima over them.",
        )
    )


def given_gradients(what: str, line: str) -> errors.ReplicatorError:
    """Returns the error for second derivatives that start from given gradients."""
    return errors.UnsupportedError(
        errors.compose(
            f"the gradient of {what} is differentiated by a tape that is "
            "given output_gradients, for which the replicas' weights are unknown.",
            [f"at {line}"],
            "multiply the target by them, and differentiate the product.",
        )
    )


def too_late(op: tf.Operation) -> errors.ReplicatorError:
    """Returns the error for an addition to a graph that is already replicated."""
    return errors.UnsupportedError(
        errors.compose(
            "a variable, a gradient, or a write of a value that depends on the "
            "examples, was added after create_distributed_session.",
            [f"at {errors.line_of(op)}"],
            "build the whole model first, then create the session.",
        )
    )
