# SPDX-License-Identifier: Apache-2.0
"""Arguments without a meaning, and calls outside of a step: one table of messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from replicator import errors
from replicator.primitives.reductions import REDUCTIONS
from tests import helpers

SCALAR = tf.TensorSpec([])
SPEC = tf.TensorSpec([2])
PAIR = tf.ones([2])
ROWS = tf.IndexedSlices(tf.ones([1]), [0], [3])
NO_NEST = {1: SPEC, "a": SPEC}  # its keys have no order
ONE_REAL = "one real number per replica"

# Of two replicas; a text is a pattern of the problem, and behind " -> " of the fix.
BAD: dict[str, list[tuple[Callable[[Any], Any], str]]] = {
    "all_reduce": [
        *(
            (lambda r, op=op: r.all_reduce(1.0, op), "given op=.* -> one of sum, mean")
            for op in ("avg", "ArgMin", None, 3, ["sum"])
        ),
        *(
            (lambda r, op=op: r.all_reduce(ROWS, op), f"the {op} of IndexedSlices ->")
            for op in REDUCTIONS
            if op not in ("sum", "mean")
        ),
        (lambda r: r.all_reduce(ROWS, "max"), "the max of .* -> convert_to_tensor"),
        (
            lambda r: r.all_reduce(tf.sparse.from_dense([1.0, 0.0])),
            "cannot communicate a SparseTensor -> component tensors",
        ),
        (
            lambda r: r.all_reduce(tf.ragged.constant([[1.0], []])),
            "cannot communicate a RaggedTensor -> component tensors",
        ),
        (lambda r: r.all_reduce([1.0, object()]), "not a tensor -> pass"),
        (lambda r: r.all_reduce({"a": None}), "not a tensor -> pass"),
        (lambda r: r.all_reduce(1.0, "sum", 2), "a weight with op='sum' -> \"mean\""),
        *(
            (
                lambda r, w=w: r.all_reduce(1.0, "mean", w),
                f"weight={text} ->{ONE_REAL}",
            )
            for w, text in [
                (PAIR, r"<tf.Tensor.*shape=\(2,\)"),
                ([1.0, 2.0], r"\[1.0, 2.0\]"),
                (1j, "1j"),
                ("two", "'two'"),
            ]
        ),
        (lambda r: r.all_reduce(1.0, algorithm="star"), "algorithm='star' -> shuffled"),
        (lambda r: r.all_reduce(1.0, group=[1]), r"the group \[1\] -> replica_id"),
        (lambda r: r.all_reduce(1.0, group="all"), r"given 'all' as a .* -> \[0, 2\]"),
    ],
    "reduce": [
        (lambda r: r.reduce(1.0, 0, "avg"), "op='avg' -> op is one of sum"),
        (lambda r: r.reduce(1, 0, "mean"), "the mean of int32 tensors -> cast to"),
        (lambda r: r.reduce(ROWS, 0, "max"), "the max of Ind.* -> convert_to_tensor"),
        (lambda r: r.reduce(object()), "not a tensor -> pass"),
    ],
    "reduce_scatter": [
        (lambda r: r.reduce_scatter(PAIR, "avg"), "op='avg' -> op is one of"),
        (
            lambda r: r.reduce_scatter(tf.constant([1]), "mean"),
            "the mean of int32 tensors -> cast to a float",
        ),
        (lambda r: r.reduce_scatter(1.0), r"axis=0 for float32\[\] -> a scalar has no"),
        (
            lambda r: r.reduce_scatter(PAIR, axis=1),
            r"axis=1 for float32\[2\] -> axis lies between -1 and 0\.",
        ),
        (lambda r: r.reduce_scatter(PAIR, axis=None), "axis=None -> axis is a Python"),
        (
            lambda r: r.reduce_scatter(ROWS),
            "cannot cut up Index.* -> all_reduce them",
        ),
    ],
    "broadcast": [
        (
            lambda r: r.broadcast(ROWS),
            "cannot send IndexedSlices -> values and indices",
        ),
        (lambda r: r.broadcast(SPEC), "given TensorSpec.*it is the root -> tensors"),
        (lambda r: r.broadcast(NO_NEST, 1), "not a nest of tensors ->"),
    ],
    **{
        name: [
            (lambda r, f=name: getattr(r, f)([1.0], axis=True), "axis=True -> int or"),
            (
                lambda r, f=name: getattr(r, f)([1.0], axis=0.0),
                "axis=0.0 -> int or",
            ),
            (
                lambda r, f=name: getattr(r, f)([1.0], axis="0"),
                "axis='0' -> int or",
            ),
            (
                lambda r, f=name: getattr(r, f)(tf.ones([1]), axis=1),
                r"axis=1 for float32\[1\] -> between -1 and 0, or is None",
            ),
            (
                lambda r, f=name: getattr(r, f)(tf.ones([1, 1]), axis=-3),
                "axis=-3 -> between -2 and 1",
            ),
            (
                lambda r, f=name: getattr(r, f)(1.0, axis=0),
                "axis=0 -> a scalar has no axis; use axis=None",
            ),
            (
                lambda r, f=name: getattr(r, f)(ROWS),
                "cannot join IndexedSlices -> gather its values",
            ),
        ]
        for name in ("all_gather", "gather")
    },
    "scatter": [
        (
            lambda r: r.scatter(tf.ones([3, 2])),
            r"float32\[3, 2\] for 2 replicas -> \[2, \.\.\.\]: one entry per replica",
        ),
        (lambda r: r.scatter(1.0), r"float32\[\] for 2 -> one entry per"),
        (lambda r: r.scatter({"a": [3, 4]}), r"int32\[\] for 2 replicas ->"),
        (lambda r: r.scatter(1.0, axis=0), r"axis=0 for float32\[\] -> use axis=None"),
        (lambda r: r.scatter(PAIR, axis=-2), "axis=-2 -> between -1 and 0, or is None"),
        (lambda r: r.scatter(PAIR, axis=True), "axis=True -> int or"),
        (lambda r: r.scatter(ROWS), "cannot send IndexedSlices -> scatter its values"),
        (
            lambda r: r.scatter(SPEC),
            "given TensorSpec.*is the root -> passes tensors",
        ),
        (lambda r: r.scatter(NO_NEST, 1), "not a nest of tensors ->"),
    ],
    "all_to_all": [
        (
            lambda r: r.all_to_all(PAIR, 1, 0),
            "split_axis=1 for -> split_axis lies between -1 and 0",
        ),
        (
            lambda r: r.all_to_all(PAIR, 0, None),
            "concat_axis=None -> concat_axis is a Python int",
        ),
        (
            lambda r: r.all_to_all(1.0, 0, 0),
            r"split_axis=0 for float32\[\] -> a scalar has no axis; reshape it",
        ),
        (
            lambda r: r.all_to_all(tf.ones([3, 2]), 0, 1),
            r"cannot cut float32\[3, 2\] into 2 slices of one size along split_axis=0"
            r" -> with splits=\[\.\.\.\]",
        ),
        (
            lambda r: r.all_to_all(tf.ones([3]), 0, 0, [1, 1, 1]),
            r"splits=\[1, 1, 1\] -> splits are 2 integers",
        ),
        (
            lambda r: r.all_to_all(tf.ones([3]), 0, 0, [4, -1]),
            r"splits=\[4, -1\] -> none below zero",
        ),
        (lambda r: r.all_to_all(PAIR, 0, 0, [1.0, 1.0]), r"s=\[1.0, 1.0\] -> integers"),
        (lambda r: r.all_to_all(PAIR, 0, 0, object()), "splits=<object -> integers"),
        (
            lambda r: r.all_to_all(tf.ones([4]), 0, 0, [1, 2]),
            r"splits=\[1, 2\] for float32\[4\] -> add up to 4",
        ),
        (lambda r: r.all_to_all(ROWS, 0, 0), "cannot cut up .* -> its values and indi"),
    ],
    "permute": [
        (
            lambda r: r.permute(1.0, [(0, 1), (0, 0)]),
            "replica 0 is source twice ->",
        ),
        (
            lambda r: r.permute(1.0, [(0, 1), (1, 1)]),
            "1 is destination twice ->",
        ),
        (lambda r: r.permute(1.0, [(0, 1, 2)]), "which are not pairs ->"),
        (lambda r: r.permute(1.0, [0, 1]), "which are not pairs ->"),
        (lambda r: r.permute(1.0, None), "which are not pairs ->"),
        (
            lambda r: r.permute(1.0, [(0, 2)]),
            "destination=2, but there are 2 replicas ->",
        ),
        (
            lambda r: r.permute(1.0, [(0, 1)], group=r.groups([[0], [1]])),
            "but replica 1 is not in the group ->",
        ),
        (lambda r: r.permute(1.0, [("0", 1)]), "source='0' ->"),
        (lambda r: r.permute(1.0, [(True, 1)]), "source=True ->"),
        (lambda r: r.permute(ROWS, []), "cannot move IndexedSlices ->"),
    ],
    "shift": [
        *(
            (lambda r, k=k: r.shift(1.0, k), "given offset= -> Python int")
            for k in (1.0, None, True, "1")
        ),
        (lambda r: r.shift(ROWS), "cannot move IndexedSlices ->"),
    ],
    "send": [
        (lambda r: r.send(1.0, 2), "destination=2, but there are 2 replicas ->"),
        (lambda r: r.send(1.0, tf.constant(1)), "destination=<tf -> a Python int"),
        (
            lambda r: r.send(1.0, 0),
            "which is the replica itself -> Python variable",
        ),
        (lambda r: r.send(1.0, 1, tag=-1), "was given tag=-1 ->"),
        (lambda r: r.send(1.0, 1, tag=True), "was given tag=True ->"),
        (lambda r: r.send(ROWS, 1), "cannot send IndexedSlices -> values and indices"),
    ],
    "recv": [
        (lambda r: r.recv(SCALAR, -1), "source=-1, but there are 2 replicas ->"),
        (lambda r: r.recv(SCALAR, 0), "source=0, which is the replica itself ->"),
        (lambda r: r.recv(SCALAR, 1, tag="a"), "was given tag='a' ->"),
        (lambda r: r.recv(ROWS, 1), "cannot receive Indexed.* -> values and indices"),
        (lambda r: r.recv(object(), 1), "which is not a tensor ->"),
        (
            lambda r: r.recv(tf.RaggedTensorSpec([None]), 1),
            "RaggedTensorSpec.*which is not a tensor ->",
        ),
        (lambda r: r.recv(NO_NEST, 1), "not a nest of tensors ->"),
    ],
    "linked": [
        (lambda r, loss=loss: r.linked(loss), "-> floating")
        for loss in (3, True, "text", [1.0, 2.0], {})
    ],
    "group": [
        (lambda r: r.group(2), r"2 as a group -> \[0, 2\]"),
        (lambda r: r.group("02"), r"'02' as a group -> \[0, 2\]"),
        (lambda r: r.group([]), r"\[\] as a group -> each once"),
        (lambda r: r.group([1, 1]), r"\[1, 1\] as a group -> each once"),
        (lambda r: r.group([0, 3]), "member=3, but there are 2 -> member < 2"),
        (lambda r: r.group([-1]), "member=-1 -> 0 <= member"),
        (lambda r: r.group([True]), "member=True -> a Python int"),
        (lambda r: r.group([tf.constant(1)]), "member=<tf.Tensor -> a Python int"),
    ],
    "groups": [
        (lambda r: r.groups([0, 1]), r"0 as a group -> \[0, 2\]"),
        (lambda r: r.groups(3), r"3 as groups. -> \[\[0, 1\], \[2, 3\]\]"),
        (lambda r: r.groups([[0]]), r"\[\[0\]\] -> each of the 2 replicas"),
        (lambda r: r.groups([[0, 1], [1]]), "-> exactly one group"),
    ],
}
# Reductions of a kind of numbers for which they mean nothing.
KINDS = {"floating": "float32", "complex": "complex64", "integer": "int32"}
KINDS |= {"bool": "bool", "": "string"}
NONSENSE = [
    (op, dtype, reduction.fix if kind else "")
    for op, reduction in REDUCTIONS.items()
    for kind, dtype in KINDS.items()
    if kind not in reduction.kinds
]
BAD["all_reduce"] += [
    (
        lambda r, op=op, dtype=dtype: r.all_reduce(tf.zeros([2], dtype), op),
        f"was asked for the {op} of {dtype} tensors -> {re.escape(fix)}",
    )
    for op, dtype, fix in NONSENSE
]
CASES = [
    pytest.param(name, *case, id=f"{name} {k}")
    for name, cases in BAD.items()
    for k, case in enumerate(cases)
]


@pytest.mark.parametrize(("name", "call", "texts"), CASES)
def test_a_bad_argument_is_named_with_the_replica_the_line_and_the_fix(
    name: str, call: Callable[[Any], Any], texts: str
) -> None:
    repl = helpers.make(2)
    problem, _, fix = map(str.strip, texts.partition("->"))
    made = name in ("group", "groups")  # by no replica
    start = rf"{name} was given" if made else rf"{name} on replica 0 .*"
    with pytest.raises(
        errors.ArgumentError,
        match=rf"(?s)^{start}.*{problem}.*at tests.primitives.test_refused\.py:\d+ in "
        rf".*\n *Fix: .*{fix}",
    ):
        if made:
            call(repl)
        repl.run(lambda: call(repl) and None)
    assert issubclass(errors.ArgumentError, ValueError)


@pytest.mark.parametrize(
    ("count", "ids", "texts"),
    [
        (4, [0, 3], "member=3, but there are 2 replicas.*Fix: .*0 <= member < 2"),
        (
            4,
            [[0, 1], [2, 3]],
            r"Partition\(.*, but there are 2 rep.*Fix: .*`groups` of",
        ),
        (1, [[0]], r"Partition\(.*, but there are 2 replicas.*Fix: .*with `groups` of"),
    ],
)
def test_groups_of_another_number_of_replicas(count: int, ids: Any, texts: str) -> None:
    repl, other = helpers.make(2), helpers.make(count)
    group = other.group(ids) if ids[0] == 0 else other.groups(ids)
    with pytest.raises(
        errors.ArgumentError, match=rf"(?s)^all_gather_object on replica 0 .*{texts}"
    ):
        repl.run(lambda: repl.all_gather_object(1, group=group) and None)


HALVES = [[0], [1]]
OUTSIDE: dict[str, Callable[[Any], Any]] = {
    "barrier": lambda r: r.barrier(),
    "linked": lambda r: r.linked(1.0),
    "send": lambda r: r.send(1.0, 1),
    "recv": lambda r: r.recv(1.0, 1),
    "all_reduce": lambda r: r.all_reduce(1.0, group=r.group([0, 1])),
    "broadcast": lambda r: r.broadcast(1.0, group=r.groups(HALVES)),
    "all_gather": lambda r: r.all_gather(1.0, group=r.groups(HALVES)),
    "all_gather_object": lambda r: r.all_gather_object(1, group=r.groups(HALVES)),
    "broadcast_object": lambda r: r.broadcast_object(1, group=r.group([0, 1])),
    "Partition.own": lambda r: r.groups(HALVES).own,
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_outside_a_step(name: str) -> None:
    with pytest.raises(
        errors.ContextError, match=rf"(?s)^{name} was called outside a step.*Fix: "
    ):
        OUTSIDE[name](helpers.make(2))
