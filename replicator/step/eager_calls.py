# SPDX-License-Identifier: Apache-2.0
"""Wrappers for eager calls of a step: arguments, exhausted inputs and results."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors, values
from replicator._tf import choice
from replicator.inputs import feeds

_OF_INPUTS = re.compile(
    rf"\{{\{{node (\S*/)?{feeds.SCOPE}(_\d+)?/({feeds.ELEMENT}(?P<taken>\d+)/)?"
)


class ExhaustedError(tf.errors.OutOfRangeError):
    """The inputs of a step have ended, rather than something that step_fn reads."""


@contextlib.contextmanager
def holding(current: list[Any], leaves: Sequence[Any]) -> Iterator[None]:
    """Stores the leaves of a call in `current` during this block."""
    current[:] = leaves
    try:
        yield
    finally:
        current.clear()


def warning_of_rest(
    run: Callable[[], Any], feed: feeds.Feed | None, steps: int
) -> Callable[[], Any]:
    """Wraps the run of a step to report exhausted inputs and warn of dropped elements.

    TensorFlow reports the end of inputs after a list of the places where the op was
    built.

    Args:
        run: Runs the steps of one call.
        feed: Their inputs.
        steps: How many there are.
    """
    if feed is None:
        return run
    changed = "and this call has changed nothing"
    if steps > 1:
        changed = (
            "and the step that lacks them has changed nothing; earlier steps of this "
            f"call, {steps - 1} at most, are done"
        )

    def call() -> Any:
        try:
            return run()
        except tf.errors.OutOfRangeError as error:
            match = _OF_INPUTS.search(error.message)
            if match is None:
                feed.note_failure()
                raise
            feed.warn_of_rest(int(match["taken"] or 0))
            text = errors.compose(
                f"End of sequence: the inputs of the step are exhausted, {changed}.",
                [f"at {errors.user_line()}"],
                "leave the loop at tf.errors.OutOfRangeError, where an epoch ends, or "
                "repeat the dataset, dataset.repeat().",
            )
            raise ExhaustedError(None, None, text) from None
        except tf.errors.OpError:
            feed.note_failure()
            raise

    return call


def packed(run: Callable[[], Any], function: Any, types: Any) -> Callable[[], Any]:
    """Wraps the run of a traced step to return a structure of PerReplica.

    Args:
        run: Runs the function.
        function: Returns a list of the leaves of each replica.
        types: What one replica returned, with the type of each leaf in its place.
    """
    leaves = tf.nest.flatten(types)
    count, pack = len(leaves), values.packer(types)
    plain = all(issubclass(leaf, tf.Tensor) for leaf in leaves)

    def call() -> Any:
        flat = run()  # like outputs.seal: no gradient passes
        if plain:
            return pack([values.PerReplica(flat[i::count]) for i in range(count)])
        rows = choice.pack_results(function, flat)
        return pack([values.PerReplica(column) for column in zip(*rows, strict=True)])

    return call
