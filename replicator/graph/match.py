"""Lines up the communication calls of all replicas.

Runs after every replica's step_fn is built and before any op is rewired. Takes Calls,
returns how they pair; reads and changes no graph. What does not pair is an error here,
so that nothing that was built can wait for a partner that never comes.
"""

from __future__ import annotations

from collections.abc import Sequence

from replicator import errors
from replicator.graph.placeholder import Call, Shape

_SAME_PROGRAM = (
    "let every replica make the same calls in the same order, and take the same "
    "gradients; move a call out of the Python code that depends on the replica."
)


def match(calls: Sequence[Sequence[Call]]) -> list[tuple[int, ...]]:
    """Pairs the n-th call of every replica, for each n, and their gradients.

    The order in which a replica's gradients are built hangs on how it uses the results
    (a + b or b + a), so a call in a gradient pairs by the call that is differentiated.

    Args:
        calls: `calls[r]` are replica r's calls, in the order its step_fn made them.

    Returns:
        `matched[n][r]` is the index in `calls[r]` of replica r's part in the n-th
        communication. Calls come before their gradients.

    Raises:
        MismatchError: The replicas make different numbers of calls, or an n-th call
            differs in primitive, options, dtype or static shape.
    """
    places = [{call.key: n for n, call in enumerate(own)} for own in calls]
    shared = [call for call in calls[0] if all(call.key in own for own in places)]
    shared.sort(key=_depth)
    for first in shared:
        for own, place in zip(calls[1:], places[1:], strict=True):
            _check_alike(first, own[place[first.key]])
    alone = [
        call for own in calls for call in own if not all(call.key in p for p in places)
    ]
    if alone:
        _raise_missing(calls, min(alone, key=_depth))
    return [tuple(place[call.key] for place in places) for call in shared]


def _depth(call: Call) -> int:
    """Returns 0 for a call, 1 for one in a gradient, 2 in a gradient's gradient."""
    return call.key.count("/")


def _named(call: Call) -> str:
    number = call.key.partition("/")[0]
    of = "A gradient of communication" if call.backward else "Communication"
    return f"{of} call {number}"


def _check_alike(first: Call, other: Call) -> None:
    difference = _difference(first, other)
    if difference:
        raise errors.MismatchError(
            errors.compose(
                f"{_named(first)} differs between replicas: {difference}.",
                [first.site(), other.site()],
                _SAME_PROGRAM
                if first.primitive != other.primitive
                else "make the calls alike on all replicas.",
            )
        )


def _difference(first: Call, other: Call) -> str:
    """Says in which respect two calls differ, or nothing if they pair."""
    if first.primitive != other.primitive:
        return "not the same primitive"
    for name in {**first.options, **other.options}:
        if first.options.get(name) != other.options.get(name):
            return f"not the same {name}"
    if len(first.agreed) != len(other.agreed):
        return "not the same number of tensors"
    for k, (one, two) in enumerate(zip(first.agreed, other.agreed, strict=True)):
        where = f" of tensor {k}" if len(first.agreed) > 1 else ""
        if one.dtype != two.dtype:
            return f"not the same dtype{where} ({one} and {two})"
        if not _compatible(one.shape, two.shape):
            return f"not the same shape{where} ({one} and {two})"
    return ""


def _compatible(one: Shape, two: Shape) -> bool:
    """Whether two static shapes can turn out equal when the step runs."""
    if one is None or two is None:
        return True
    return len(one) == len(two) and all(
        a is None or b is None or a == b for a, b in zip(one, two, strict=True)
    )


def _raise_missing(calls: Sequence[Sequence[Call]], extra: Call) -> None:
    counts = [
        f"replica {r}: {len(own)} calls" + (f", the last one: {own[-1]}" if own else "")
        for r, own in enumerate(calls)
    ]
    raise errors.MismatchError(
        errors.compose(
            f"{_named(extra)} of replica {extra.replica_id} has no partner: {extra}.",
            counts,
            _SAME_PROGRAM,
        )
    )
