# SPDX-License-Identifier: Apache-2.0
"""Checks that the suite detects errors, mostly without the library."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.spmd import (
    calls,
    changes,
    definitions,
    many,
    mismatches,
    runner,
    simulator,
    strategies,
)
from tests.spmd import program as p

# --- The definitions, on numbers that can be checked by eye ---------------------------

ONE, TWO, THREE = (np.float32([[n, 10 * n], [100 * n, n]]) for n in (1, 2, 3))


@pytest.mark.parametrize(
    ("primitive", "options", "want"),
    [
        ("all_reduce", {"op": "sum"}, [[[6, 60], [600, 6]]] * 3),
        ("all_reduce", {"op": "mean"}, [[[2, 20], [200, 2]]] * 3),
        ("all_reduce", {"op": "prod"}, [[[6, 6e3], [6e6, 6]]] * 3),
        ("all_reduce", {"op": "argmax"}, [THREE] * 3),
        ("all_reduce", {"op": "mean", "weight": [1, 0, 1]}, [TWO] * 3),
        ("all_reduce", {"op": "mean", "weight": [0, 0, 0]}, [0 * ONE] * 3),
        ("reduce", {"op": "min", "root": 1}, [None, ONE, None]),
        ("reduce_scatter", {"axis": 0}, [[[6, 60]], [[600, 6]], np.zeros([0, 2])]),
        ("broadcast", {"root": 2}, [THREE] * 3),
        ("all_gather", {"axis": None}, [[ONE, TWO, THREE]] * 3),
        ("all_gather", {"axis": 0}, [[*ONE, *TWO, *THREE]] * 3),
        ("gather", {"root": 0}, [[ONE, TWO, THREE], None, None]),
        ("scatter", {"axis": 1}, [[[1], [100]], [[10], [1]], np.zeros([2, 0])]),
        ("permute", {"pairs": [(0, 2), (2, 1)]}, [0 * ONE, THREE, ONE]),
        ("shift", {"offset": 1}, [THREE, ONE, TWO]),
        ("shift", {"offset": -1}, [TWO, THREE, ONE]),
        (
            "all_to_all",
            {
                "split_axis": 0,
                "concat_axis": 0,
                "splits": [(1, 1, 0), (0, 0, 2), (0, 1, 1)],
            },
            [ONE[:1], [ONE[1], THREE[0]], [*TWO, THREE[1]]],
        ),
    ],
)
def test_definitions(primitive: str, options: dict[str, Any], want: Any) -> None:
    got = getattr(definitions, primitive)([ONE, TWO, THREE], **options)
    for value, expected in zip(got, want, strict=True):
        assert (value is None) == (expected is None)
        if value is not None:
            np.testing.assert_array_equal(value, np.float32(expected))


def test_all_to_all_exchanges_axes() -> None:
    one, two = definitions.all_to_all([ONE, TWO], split_axis=0, concat_axis=1)
    np.testing.assert_array_equal(one, [[1, 10, 2, 20]])
    np.testing.assert_array_equal(two, [[100, 1, 200, 2]])


# --- The simulator --------------------------------------------------------------------


def _sum(target: str, source: str) -> p.Collective:
    return p.Collective(target, "all_reduce", source, (("op", "sum"),))


def _program(*statements: p.Statement, differentiate: str = "") -> p.Program:
    data = p.Data("v0", "float64", ((2,), (2,)), seed=3)
    return p.Program(2, (data,), p.Block(statements), differentiate)


def test_loops_messages_and_slopes() -> None:
    body = p.Block((_sum("v2", "v1"),), ("v2",))
    program = _program(
        p.Loop(("v3",), p.Number(2, 4), ("v0",), ("v1",), body),
        p.Send("v3", 0, 1, 0),
        p.Recv("v4", 0, 1, 0, ("float64", (2,))),
    )
    scope = simulator.run(program)
    zero, one = scope["v0"]
    np.testing.assert_allclose(scope["v3"][0], 2 * (zero + one))
    assert scope["v4"][0] is None
    np.testing.assert_array_equal(scope["v4"][1], scope["v3"][1])
    # Weights in eighths: 1 and 2 for v0, 2 and 3 for v3, 4 for v4 on replica 1.
    slopes = simulator.slopes(program, [{("v0", 0): np.float64([1, 0])}])
    np.testing.assert_allclose(slopes, [(1 + 2 * (2 + 3 + 4)) / 8])


def test_there_is_no_slope_at_a_kink() -> None:
    extremum = p.Collective("v1", "all_reduce", "v0", (("op", "max"),))
    data = p.Data("v0", "float64", ((), ()), seed=3)
    program = p.Program(2, (data,), p.Block((extremum,)))
    zero, one = simulator.run(program)["v0"]
    level = {("v0", 0): one - zero}
    scope = simulator.run(program, nudge=level)
    assert scope["v1"][0] == scope["v0"][0] == scope["v0"][1]
    flat = p.Local("v1", "mix", ("v0", "v0"))
    both = p.Program(
        2,
        (data,),
        p.Block((flat, dataclasses.replace(extremum, target="v2", source="v1"))),
    )
    assert simulator.slopes(both, [{("v0", 0): np.float64(1)}]) != [None]


# --- The listing ----------------------------------------------------------------------


def test_a_program_prints_as_a_step_function() -> None:
    inside = p.Block((_sum("v2", "v1"),), ("v2",))
    program = _program(
        p.Call(("v3",), ("v0",), ("v1",), inside, times=2),
        p.Collective("v4", "reduce", "v3", (("root", 1),), ((1,),)),
        differentiate="tape",
    )
    assert (
        str(program)
        == """
# 2 replicas, eager
def valid():
    r = repl.replica_id
    v0 = data('float64', (2,), seed=3)
    with tf.GradientTape() as tape:
        tape.watch((v0,))
        @tf.function(autograph=False)
        def function_v3(v1):
            r = repl.replica_id
            v2 = repl.all_reduce(v1, op='sum')
            return like(v2, v1)
        v3 = function_v3(v0)
        v3 = function_v3(v3)
        v4 = repl.reduce(v3, root=1, group=[1]) if r in [1] else None
        loss = loss_of(v0, v3, v4)
    gradients = tape.gradient(loss, (v0,), **ZERO)
    return present(v0, v3, v4), gradients

def step_fn():
    return valid()
"""
    )


# --- The drawn programs ---------------------------------------------------------------


@pytest.mark.parametrize(
    "differentiate", ["", pytest.param("tape", marks=pytest.mark.slow)]
)
def test_all_kinds_of_statements_are_drawn(differentiate: str) -> None:
    counts: collections.Counter[str] = collections.Counter()

    def note(program: p.Program) -> None:
        for path, statement in p.walk(program.body):
            counts[type(statement).__name__] += 1
            counts[f"depth {len(path) // 2}"] += 1
            if isinstance(statement, p.Collective):
                counts[statement.primitive] += 1
                counts["group"] += statement.groups is not None
                counts["partition"] += len(statement.groups or ()) > 1
                counts["weight"] += statement.option("weight") is not None
                counts["splits"] += statement.option("splits") is not None
                counts["spec"] += statement.spec is not None

    kind = strategies.Kind(differentiate)
    many.for_all(strategies.programs(kind), note, count=400, seed=1)
    expected = {"Local", "Choose", "Loop", "Map", "Scan", "Call", "Send", "Recv"}
    expected |= {f"depth {n}" for n in range(4)}
    expected |= {"Barrier", "group", "partition", "weight", "splits", *calls.CALLS}
    expected |= set() if differentiate else {"Data", "spec"}
    assert not [name for name in expected if counts[name] < 3], counts


# --- Errors that the suite finds ------------------------------------------------------


def test_a_wrong_result_is_found() -> None:
    """One replica computes something else."""
    program = _program(p.Local("v1", "times_own", ("v0",)), _sum("v2", "v1"))
    wrong = p.Block((p.Local("v1", "squash", ("v0",)), _sum("v2", "v1")))
    runner.check(program)
    with pytest.raises(AssertionError, match="v1 on replica 1"):
        runner.check(dataclasses.replace(program, broken=((1, wrong),)))


def test_a_wrong_gradient_is_found() -> None:
    program = _program(p.Local("v1", "squash", ("v0",)), differentiate="tape")
    wrong = p.Block(
        (p.Local("v2", "stopped", ("v0",)), p.Local("v1", "squash", ("v2",)))
    )
    runner.check(program)
    with pytest.raises(AssertionError, match="gradient of v0 on replica 1"):
        runner.check(dataclasses.replace(program, broken=((1, wrong),)))


def test_a_program_that_is_not_refused_is_found() -> None:
    program = _program(_sum("v1", "v0"))
    wrong = mismatches.Wrong("more", program, changes.errors.MismatchError, "")
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        runner.check_refused(wrong)
