# SPDX-License-Identifier: Apache-2.0
"""Lines up the communication calls of all replicas.

Runs after every replica's step_fn is built and before any op is rewired. `check` takes
the calls of the whole step and raises unless each has its partners; `pair` groups the
ops of one graph level that are merged into one. Both read facts and change no graph. An
unpaired call is an error here, at build time, so that no step can hang waiting for a
partner that never arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import tensorflow as tf

from replicator import errors
from replicator.graph.ir.placeholder import Call
from replicator.graph.ir.shapes import Shape
from replicator.graph.matching import gradients, near_misses

_SAME_PROGRAM = (
    "let every replica make the same calls in the same order, and take the same "
    "gradients; move a call out of the Python code that depends on the replica."
)
_GRADIENT = (
    "let every replica that takes part differentiate through its call; where a loss "
    "does not depend on what the replica sent, differentiate repl.linked(loss); where "
    "a replica receives, pass a tensor that the tape watches in place of the "
    "TensorSpec."
)
_NOTHING = "tf.reduce_sum(tf.reshape(y, [-1])[:0])"  # 0, even if y is infinite
_MESSAGE_GRADIENT = (
    f"{_GRADIENT[:-1]}; where a loss does not depend on the received y, add {_NOTHING} "
    "to it."
)
_LINK_INSIDE = (
    "repl.linked reaches values sent where it is called, but not those sent inside "
    "conditionals, loops and functions that return none of them: let the branch, body "
    "or function that sends return repl.linked(y) in place of a y on which the loss "
    "depends."
)
_SAME_PLACES = (
    "let all replicas communicate inside the same branches, loops and functions."
)
_ONE_SHAPE = (
    "assign a value of the same dtype and shape on all replicas, gathered by "
    "repl.all_gather, for example; or create the variable with "
    "synchronization=tf.VariableSynchronization.ON_READ, so that each replica keeps "
    "its own."
)
_MESSAGE = "let the source send and the destination recv equally often, with one tag."


class Site(Protocol):
    """An op that communicates, or a control flow op with communication inside."""

    @property
    def construct(self) -> str:
        """The kind of op: a call, a conditional, a loop or a function."""

    @property
    def op(self) -> tf.Operation:
        """The op itself."""

    @property
    def calls(self) -> tuple[Call, ...]:
        """All calls of the op, including those inside its functions."""

    @property
    def replica_id(self) -> int:
        """The replica that built the op."""

    def site(self) -> str:
        """Returns the error message line that locates the op."""


S = TypeVar("S", bound=Site)


def check(
    calls: Sequence[Sequence[Call]],
    places: Sequence[Mapping[str, str]] = (),
    passes: Sequence[gradients.Passes] = (),
) -> None:
    """Raises unless the calls of all replicas pair, in order within each group.

    The order in which a replica's gradients are built depends on how it uses the
    results (a + b or b + a), so a call in a gradient is paired by the call it
    differentiates.

    Args:
        calls: `calls[r]` are replica r's calls, in the order its step_fn made them.
        places: `places[r]` maps the keys of replica r's calls inside control flow to
            its kind, e.g. "loop". Used in messages only.
        passes: `passes[r]` are those in which replica r takes gradients, if known.

    Raises:
        MismatchError: The replicas make different numbers of calls, or an n-th call
            differs in primitive, options, dtype or static shape.
    """
    partners: dict[str, dict[int, Call]] = {}
    for replica_calls in calls:
        for call in replica_calls:
            partners.setdefault(call.key, {})[call.replica_id] = call
    complete = [key for key, members in partners.items() if _is_complete(members)]
    for key in sorted(complete, key=lambda key: key.count("/")):
        first, *others = partners[key].values()
        for other in others:
            _check_alike(first, other)
    swapped = gradients.out_of_order(calls, [partners[key] for key in complete], passes)
    if swapped is not None:
        raise errors.MismatchError(
            f"{_named(swapped[0])} pairs with the gradient of another loss.",
            [call.site() for call in swapped],
            "take the gradients of several losses in the same order on all replicas; "
            f"where a loss does not depend on the call, add {_NOTHING} to it, of the "
            "call's result y.",
        )
    paired = set(complete)
    unpaired = [
        call
        for replica_calls in calls
        for call in replica_calls
        if call.key not in paired
    ]
    if unpaired:
        extra = min(unpaired, key=lambda call: call.depth)
        _raise_missing(calls, extra, unpaired, _sent_inside(calls, extra, places))


def _is_complete(partners: dict[int, Call]) -> bool:
    """Whether every replica of the group makes the call."""
    first = next(iter(partners.values()))
    return set(partners) == set(first.group)


def _named(call: Call) -> str:
    if call.channel and call.pairs_as == "message":
        source, _, rest = call.channel.partition(">")
        destination, _, tag = rest.partition("#")
        where = f"Message {call.number} from {source} to {destination}, tag {tag},"
        return f"A gradient of m{where[1:]}" if call.backward else where
    of = "A gradient of communication" if call.backward else "Communication"
    group = f" of group [{', '.join(map(str, call.group))}]" if call.channel else ""
    return f"{of} call {call.number}{group}"


def _check_alike(first: Call, other: Call) -> None:
    difference = _difference(first, other)
    if difference:
        raise errors.MismatchError(
            f"{_named(first)} differs between replicas: {difference}.",
            [first.site(), other.site()],
            _SAME_PROGRAM
            if first.pairs_as != other.pairs_as
            else _ONE_SHAPE
            if first.writes and first.writes == other.writes
            else f"{near_misses.axis(first, other)}make the calls the same on all "
            "replicas.",
        )


def _difference(first: Call, other: Call) -> str:
    """Describes how two calls differ, or returns "" if they pair."""
    if first.pairs_as != other.pairs_as:
        return "not the same primitive"
    if first.pairs_as == "message" and first.primitive == other.primitive:
        return f"both replicas {first.primitive}"
    if first.assignment != other.assignment:
        return _other_write(first, other)
    for name in {**first.options, **other.options}:
        if first.options.get(name) != other.options.get(name):
            return f"not the same {name}"
    if first.conditional != other.conditional:
        return "only one may be left out when the step runs"
    if first.policies != other.policies:
        return _other_policy(first, other)
    if len(first.agreed) != len(other.agreed):
        return "not the same number of tensors"
    for k, (first_value, other_value) in enumerate(
        zip(first.agreed, other.agreed, strict=True)
    ):
        where = f" of tensor {k}" if len(first.agreed) > 1 else ""
        if first_value.dtype != other_value.dtype:
            return f"not the same dtype{where} ({first_value} and {other_value})"
        if not _compatible(first_value.shape, other_value.shape):
            return f"not the same shape{where} ({first_value} and {other_value})"
    return ""


def _other_write(first: Call, other: Call) -> str:
    """Describes how calls differ in the assignment whose value they agree on."""
    texts = [call.writes or "no assignment" for call in (first, other)]
    if texts[0] == texts[1]:
        return f"not the same variable (two are called {texts[0].rpartition('.')[0]})"
    return f"not the same assignment ({texts[0]} and {texts[1]})"


def _other_policy(first: Call, other: Call) -> str:
    """Describes how calls differ whose operands belong to different variables."""
    for k in range(max(len(first.policies), len(other.policies))):
        first_policy, other_policy = first.policy(k), other.policy(k)
        if first_policy.variable != other_policy.variable:
            return f"tensor {k} is not of the same variable"
        for name in ("owner", "algorithm", "bucket"):
            if getattr(first_policy, name) != getattr(other_policy, name):
                return f"not the same {name} of tensor {k}"
    return "not the same number of tensors"


def _compatible(one: Shape, two: Shape) -> bool:
    """Whether two static shapes may be equal at run time."""
    if one is None or two is None:
        return True
    return len(one) == len(two) and all(
        a is None or b is None or a == b for a, b in zip(one, two, strict=True)
    )


def _raise_missing(
    calls: Sequence[Sequence[Call]],
    extra: Call,
    unmatched: Sequence[Call],
    inside: Sequence[str],
) -> None:
    """Reports a call without a partner, and what the others of its group call."""
    near = near_misses.find(calls, extra, unmatched)
    sites = [extra.site(), *near_misses.by_replica(calls, extra, unmatched, near)]
    sites += [
        f"with a different {' and '.join(differences)}: {c.site()}"
        for differences, c in near
    ]
    fix = _MESSAGE if extra.pairs_as == "message" else _SAME_PROGRAM
    if near:
        same = " and ".join(
            dict.fromkeys(name for differences, _ in near for name in differences)
        )
        fix = f"give calls that belong together the same {same}; otherwise, {fix}"
    if extra.backward:
        fix = _MESSAGE_GRADIENT if extra.pairs_as == "message" else _GRADIENT
    if inside:
        fix = _LINK_INSIDE
    raise errors.MismatchError(
        f"{_named(extra)} of replica {extra.replica_id} has no partner: {extra}.",
        [*sites, *inside],
        fix,
    )


def _sent_inside(
    calls: Sequence[Sequence[Call]], extra: Call, places: Sequence[Mapping[str, str]]
) -> list[str]:
    """Lists the sends that a linked loss does not reach, if these may be the cause.

    Args:
        calls: All calls of all replicas.
        extra: A call without a partner; sends are listed only if it is in a gradient.
        places: As for `check`.
    """
    root = extra.key.partition("/")[0]
    return [
        f"inside a {places[replica_id][call.key]}, {call.site()}"
        for replica_id in (extra.group if extra.backward and places else ())
        for call in calls[replica_id]
        if call.key == root and call.receipt and root in places[replica_id]
    ]


def pair(
    sites: Sequence[Sequence[S]],
    local: Sequence[int] | None = None,
    calls: Iterable[Call] = (),
) -> list[tuple[S, ...]]:
    """Groups the ops of one graph level that are merged into one.

    Ops that share a call are grouped: the calls of a collective, or the replicas' loops
    with that call inside. Where several ops of a replica contain the same call (a
    function called twice), they pair in order.

    Args:
        sites: `sites[n]` are one replica's communicating ops on this level, in order.
        local: The replicas built in this process; by default, all of each group.
        calls: All calls of the step, on any level. Used in messages only.

    Returns:
        The groups, each in replica order; forward calls come before gradients.

    Raises:
        MismatchError: A call is inside control flow on one replica, and outside it or
            inside different control flow on another.
    """
    holders: dict[tuple[str, int], list[S]] = {}
    for replica_sites in sites:
        counts: dict[str, int] = {}
        for site in replica_sites:
            for key in dict.fromkeys(call.key for call in site.calls):
                holders.setdefault((key, counts.get(key, 0)), []).append(site)
                counts[key] = counts.get(key, 0) + 1
    joined: dict[int, list[S]] = {
        id(site): [site] for replica_sites in sites for site in replica_sites
    }
    for sites_of_call in holders.values():
        for other in sites_of_call[1:]:
            _join(joined, sites_of_call[0], other)
    nodes = {id(node): node for node in joined.values()}
    for node in nodes.values():
        node.sort(key=lambda site: site.replica_id)
        _check_structure(node, local, calls)
    return sorted(
        (tuple(node) for node in nodes.values()),
        key=lambda node: node[0].calls[0].depth,
    )


def _join(joined: dict[int, list[S]], one: S, other: S) -> None:
    """Merges the groups of two ops."""
    whole, part = joined[id(one)], joined[id(other)]
    if whole is not part:
        whole += part
        for site in part:
            joined[id(site)] = whole


def _check_structure(
    node: Sequence[S], local: Sequence[int] | None, calls: Iterable[Call]
) -> None:
    """Raises unless ops that share calls are of one construct, one per replica."""
    first = node[0]
    present = {site.replica_id for site in node}
    for site in node:
        for call in site.calls:
            absent = set(call.group) - present
            if local is not None:
                absent &= set(local)
            if absent:
                raise _absent(site, call, sorted(absent), calls)
    for preceding, site in zip(node, node[1:], strict=False):
        if site.construct != first.construct:
            problem = (
                "the replicas communicate at different places in the control flow: "
                f"{_described(first)} on replica {first.replica_id}, "
                f"{_described(site)} on replica {site.replica_id}."
            )
            involved = [first, site]
        elif site.replica_id == preceding.replica_id:
            problem = (
                f"replica {site.replica_id} makes in two {site.construct}s the calls "
                "that another replica makes in one."
            )
            involved = [preceding, site]
            involved += [s for s in node if s.replica_id != site.replica_id][:1]
        else:
            continue
        raise errors.MismatchError(problem, [s.site() for s in involved], _SAME_PLACES)


def _absent(
    site: S, call: Call, absent: Sequence[int], calls: Iterable[Call]
) -> errors.MismatchError:
    """Returns the error for a call that other replicas make at another place."""
    elsewhere = {
        other.replica_id: other.site()
        for other in calls
        if other.key == call.key and other.replica_id in absent
    }
    return errors.MismatchError(
        f"replica {site.replica_id} makes a call at a place in the control flow where "
        f"there is none of replica {', '.join(map(str, absent))}: it is made in "
        "another branch there, or a function is called less often.",
        [site.site(), *elsewhere.values()],
        _SAME_PLACES,
    )


def _described(site: S) -> str:
    return (
        "at the top level" if site.construct == "call" else f"inside a {site.construct}"
    )
