"""Methods of Replicator that mean the step which is being built: only one of its own.

What a primitive needs it takes from the context, which knows the replica that calls it.
Which Replicator was asked, only the method knows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replicator import context, errors


def primitive(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a primitive as a method of Replicator."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[this, *signature.parameters.values()]
    )
    return in_own_steps(call)


def in_own_steps(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method of Replicator refuse to be called in another one's step."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        replica = context.current()
        # A Replicator has one ledger, for all its builds.
        if replica is not None and replica.build.ledger is not self._settings.ledger:
            raise _elsewhere(self, method.__name__, replica)
        return method(self, *args, **kwargs)

    return tf.autograph.experimental.do_not_convert(call)


def _elsewhere(
    asked: Any, what: str, replica: context.ReplicaContext
) -> errors.ContextError:
    return errors.ContextError(
        errors.compose(
            f"{what} of the Replicator on {list(asked.devices)} was called on replica "
            f"{replica.replica_id} in a step of another Replicator, on "
            f"{list(replica.build.devices)}.",
            [f"at {errors.user_line()}"],
            f"call {what} of the Replicator that runs the step.",
        )
    )
