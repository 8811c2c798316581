"""Lines up the communication calls of all replicas.

Runs after every replica's step_fn is built and before any op is rewired. Takes Calls,
returns how they pair; reads and changes no graph. What does not pair is an error here,
so that nothing that was built can wait for a partner that never comes.
"""

from __future__ import annotations

from collections.abc import Sequence

from replicator import errors
from replicator.graph.placeholder import Call, Shape, Value

_SAME_PROGRAM = (
    "let every replica make the same calls in the same order; move a call out of the "
    "Python code that depends on the replica."
)


def match(calls: Sequence[Sequence[Call]]) -> list[tuple[int, ...]]:
    """Pairs the n-th call of every replica, for each n.

    Args:
        calls: `calls[r]` are replica r's calls, in the order its step_fn made them.

    Returns:
        `matched[n][r]` is the index in `calls[r]` of replica r's part in the n-th
        communication.

    Raises:
        MismatchError: The replicas make different numbers of calls, or an n-th call
            differs in primitive, options, dtype or static shape.
    """
    shortest = min(len(own) for own in calls)
    for n in range(shortest):
        first = calls[0][n]
        for own in calls[1:]:
            _check_alike(n, first, own[n])
    for own in calls:
        if len(own) > shortest:
            _raise_missing(calls, own[shortest], shortest)
    return [tuple(n for _ in calls) for n in range(shortest)]


def _check_alike(n: int, first: Call, other: Call) -> None:
    difference = _difference(first, other)
    if difference:
        raise errors.MismatchError(
            errors.compose(
                f"Communication call {n} differs between replicas: {difference}.",
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


def common_shape(values: Sequence[Value]) -> Shape:
    """Returns what is known of a shape from all replicas' views of it."""
    known: Shape = None
    for value in values:
        if known is None:
            known = value.shape
        elif value.shape is not None:
            known = tuple(
                b if a is None else a for a, b in zip(known, value.shape, strict=True)
            )
    return known


def _raise_missing(calls: Sequence[Sequence[Call]], extra: Call, n: int) -> None:
    counts = [
        f"replica {r}: {len(own)} calls" + (f", the last one: {own[-1]}" if own else "")
        for r, own in enumerate(calls)
    ]
    raise errors.MismatchError(
        errors.compose(
            f"Communication call {n} of replica {extra.replica_id} has no partner: "
            f"{extra}.",
            counts,
            _SAME_PROGRAM,
        )
    )
