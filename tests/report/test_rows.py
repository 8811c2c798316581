# SPDX-License-Identifier: Apache-2.0
"""The rows and the totals of plans, compared with source lines and manual counts."""

from __future__ import annotations

import io
import json
import linecache
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator import errors, report, strategy
from replicator.graph.ir.placeholder import Value
from replicator.graph.lowering.record import Link
from replicator.plan import Plan, Row, Total
from tests import helpers
from tests.report import examples

_ROOT = pathlib.Path(__file__).parents[2]


def _plan(num_replicas: int, make: Callable[[replicator.Replicator], Any]) -> Plan:
    repl = helpers.make(num_replicas, algorithm=None)  # the cheapest, for every run
    return repl.build(make(repl)).plan


def _marked(row: Row) -> str:
    """Returns the comment at the end of the line that a row names."""
    (line,) = row.lines
    place, _, _ = line.partition(" in ")
    filename, _, number = place.rpartition(":")
    return linecache.getline(filename, int(number)).rpartition("# ")[2].strip()


# --- Rows ----------------------------------------------------------------------------


def test_the_rows_of_a_step_that_communicates_everywhere() -> None:
    plan = _plan(2, examples.everywhere)
    conditional = "function inner > conditional (true)"
    assert [
        (r.primitive, r.reduction, r.place, r.times, r.backward, _marked(r))
        for r in plan
    ] == [
        ("all_reduce", "mean", "top level", 1, False, "at the top"),
        ("all_reduce", "sum", "loop body", 6, False, "in the counted loop"),
        ("broadcast", "", conditional, None, False, "in the cond"),
        ("all_gather", "", "loop body", None, False, "in the other loop"),
        ("reduce_scatter", "sum", "loop body", None, True, "the gradients"),
        ("all_reduce", "sum", conditional, None, True, "the gradients"),
        ("all_reduce", "sum", "loop body", None, True, "the gradients"),
        ("all_reduce", "mean", "top level", 1, True, "the gradients"),
    ]
    totals = plan.totals.per_step
    words = f"<Plan of {len(plan)} rows: {totals.communications} communications in each"
    assert repr(plan).startswith(words) and "\n" not in repr(plan)
    assert plan[2].options == {"root": 1}
    assert {r.group for r in plan} == {(0, 1)}
    assert plan[0].operands == ((Value("float32", (2,)),),) * 2
    assert [r.algorithm for r in plan[:5]] == ["hub"] * 2 + ["direct", "hub", "direct"]


def test_the_plan_is_the_same_in_all_modes() -> None:
    results = []
    for mode in helpers.MODES:
        repl = helpers.make(2)
        helpers.run(mode, repl, lambda repl=repl: examples.everywhere(repl))
        results.append([(r.primitive, r.place, r.nbytes, r.lines) for r in repl.plan])
    assert results[0] == results[1] == results[2]


def test_counted_loops_multiply_and_a_turn_is_one_row() -> None:
    def make(repl: replicator.Replicator) -> Any:
        def step() -> Any:
            x = helpers.opaque(1.0)
            for _ in tf.range(8):  # several turns are taken at once
                x = repl.all_reduce(x, "mean")
                for _ in tf.range(5):
                    x = repl.all_reduce(x, "max")
            return x

        return step

    outer, inner = _plan(2, make)
    assert (outer.place, outer.times) == ("loop body", 8)
    assert (inner.place, inner.times) == ("loop body > loop body", 40)


def test_each_branch_has_its_rows() -> None:
    def make(repl: replicator.Replicator) -> Any:
        def call(op: str) -> Any:
            return lambda: repl.all_reduce(1.0, op)

        def step() -> Any:
            index = helpers.opaque(1)
            x = tf.switch_case(index, [call("sum"), call("min"), call("max")])
            return x + tf.cond(index > 0, lambda: 0.0, call("prod"))

        return step

    assert [(r.reduction, r.place, r.times) for r in _plan(2, make)] == [
        ("sum", "conditional (branch 0)", None),
        ("min", "conditional (branch 1)", None),
        ("max", "conditional (branch 2)", None),
        ("prod", "conditional (false)", None),
    ]


def test_what_an_optimizer_accumulates_is_sent_when_it_is_due() -> None:
    repl = helpers.make(2)
    with repl.context():
        variable = tf.keras.Variable([1.0, 2.0])
        optimizer = repl.wrap_optimizer(
            tf.keras.optimizers.SGD(0.1), accumulation_steps=2
        )

    def step() -> None:
        optimizer.apply([variable * 1.0], [variable])

    (row,) = repl.build(step).plan
    assert (row.place, row.times) == ("conditional (when due)", None)
    assert row.options == {}
    assert row.nbytes == 2 * 8


def test_a_function_has_rows_for_each_time_that_it_is_called() -> None:
    def make(repl: replicator.Replicator) -> Any:
        @tf.function
        def total(x: tf.Tensor) -> tf.Tensor:
            return repl.all_reduce(x)

        return lambda: total(total(helpers.opaque(1.0)))

    assert [r.place for r in _plan(2, make)] == ["function total"] * 2


def test_what_is_built_twice_has_one_row() -> None:
    """A function that creates variables is traced twice."""
    variables: list[tf.Variable] = []

    def step() -> Any:
        if len(variables) <= repl.replica_id:
            variables.append(tf.Variable(1.0))
        return repl.all_reduce(variables[repl.replica_id])

    repl = helpers.make(2)
    assert len(repl.build(step).plan) == 1


def test_replicas_that_ask_from_different_lines_have_them_all() -> None:
    def make(repl: replicator.Replicator) -> Any:
        def step() -> Any:
            if repl.replica_id:
                return repl.all_reduce(1.0)
            return repl.all_reduce(2.0)

        return step

    (row,) = _plan(3, make)
    first, second = (int(line.split(":")[-1].split()[0]) for line in row.lines)
    assert first == second + 1


# --- Synchronizers -------------------------------------------------------------------


def _applied(**options: Any) -> Plan:
    repl = helpers.make(2, **options)
    with repl.context():
        variables = [tf.Variable([1.0] * 4, name=f"v{k}") for k in range(3)]
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0))

    def step_fn() -> Any:
        optimizer.apply([v * 1.0 for v in variables], variables)
        return repl.all_reduce(1.0)

    return repl.build(step_fn).plan


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"strategy": strategy.AllReduce(chunk_size=2)},
            ["all-reduce group 0, all-reduce group 1"],
        ),
        ({"strategy": strategy.PSLoadBalancing()}, ["PS 0, PS 1"]),
        ({"strategy": strategy.PS(local_proxy_variable=True)}, ["PS 0", ""]),
        ({"variables": "sharded"}, ["PS 0"]),
    ],
)
def test_rows_say_the_synchronizers_of_variables(
    options: dict[str, Any], expected: list[str]
) -> None:
    plan = _applied(**options)
    assert [row.synchronizer for row in plan] == [*expected, ""]
    assert Plan.from_json(plan.to_json()) == plan
    text = io.StringIO()
    plan.print(text)
    assert expected[0].split(", ")[0] in text.getvalue()
    old = plan.to_json().replace('"synchronizer"', '"unknown"')
    assert {row.synchronizer for row in Plan.from_json(old)} == {""}


# --- Bytes ---------------------------------------------------------------------------


def _of_two(repl: replicator.Replicator) -> Any:
    if repl.replica_id == 1:
        return tf.constant(0.0)
    return repl.all_reduce(tf.constant(1.0), group=repl.group([0, 2]))


def _ordered(repl: replicator.Replicator) -> Any:
    repl.barrier()
    return tf.constant(1.0)


def _together(repl: replicator.Replicator) -> Any:
    return repl.all_reduce([tf.ones([3]), tf.ones([4]), tf.ones([], tf.int64)])


@pytest.mark.parametrize(
    ("num_replicas", "call", "sent"),
    [
        # To a hub and back.
        (1, lambda repl: repl.all_reduce(tf.ones([5, 7])), (0,)),
        (2, lambda repl: repl.all_reduce(tf.ones([5, 7]), "mean"), (140, 140)),
        (4, lambda repl: repl.all_reduce(tf.ones([5, 7]), "max"), (140,) * 3 + (420,)),
        (2, _together, (36, 36)),
        (3, _of_two, (0, 4, 4)),
        # From the root.
        (1, lambda repl: repl.broadcast(tf.ones([6], tf.float64), 0), (0,)),
        (3, lambda repl: repl.broadcast(tf.ones([6], tf.float64), 2), (0, 0, 96)),
        # Shares to a hub, which sends the whole of 48 bytes to two others.
        (
            3,
            lambda repl: repl.all_gather(tf.ones([repl.replica_id + 1, 2]), axis=0),
            (16, 24, 96),
        ),
        (3, _ordered, (0, 0, 0)),
    ],
)
def test_each_replica_sends_what_a_manual_count_says(
    num_replicas: int, call: Callable[[Any], Any], sent: tuple[int, ...]
) -> None:
    (row,) = _plan(num_replicas, lambda repl: lambda: call(repl))
    by_replica = dict.fromkeys(range(num_replicas), 0)
    for link in row.links:
        by_replica[link.source] += link.nbytes or 0
    assert sorted(by_replica.values()) == list(sent)
    assert row.nbytes == sum(sent)


def test_rows_say_who_sends_what_to_whom() -> None:
    (row,) = _plan(3, lambda repl: lambda: _of_two(repl))
    assert row.group == (0, 2)
    assert row.links == (Link(0, 2, 4), Link(2, 0, 4))
    call = lambda repl: lambda: repl.broadcast(tf.ones([12]), 2)  # noqa: E731
    (row,) = _plan(3, call)
    assert row.sent == (0, 0, 96) and row.links == (Link(2, 0, 48), Link(2, 1, 48))


def test_a_reduce_scatter_sends_each_replica_its_slice() -> None:
    def make(repl: replicator.Replicator) -> Any:
        def step() -> Any:
            x = helpers.opaque([1.0, 2.0])
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.reduce_sum(repl.all_gather(x) ** 2)
            return tape.gradient(y, x)

        return step

    row = _plan(3, make)[1]
    assert (row.primitive, row.backward) == ("reduce_scatter", True)
    assert row.sent == (16, 16, 16)  # two others, two floats each


def test_a_message_has_one_row_with_the_lines_of_both_ends() -> None:
    def make(repl: replicator.Replicator) -> Any:
        def step() -> Any:
            x = tf.ones([4])
            if repl.replica_id == 2:
                repl.send(x, 0, tag=5)  # the send
            elif repl.replica_id == 0:
                x = repl.recv(tf.TensorSpec([4]), 2, tag=5)  # the recv
            return x

        return step

    (row,) = _plan(3, make)
    assert (row.primitive, row.algorithm, row.group) == ("message", "direct", (0, 2))
    assert row.options == {"source": 2, "destination": 0, "tag": 5}
    assert row.operands == ((), (Value("float32", (4,)),))
    assert row.links == (Link(2, 0, 16),)
    assert row.sent == (0, 16)
    numbers = [int(line.split(":")[-1].split()[0]) for line in row.lines]
    assert numbers[0] == numbers[1] + 2


def test_unknown_sizes_are_none_and_counted_apart() -> None:
    def make(repl: replicator.Replicator) -> Any:
        def step() -> Any:
            unknown = helpers.opaque([1.0, 2.0], [None])
            return repl.all_reduce(unknown), repl.all_reduce(1.0)

        return step

    plan = _plan(2, make)
    assert plan[0].sent == (None, None)
    assert plan[0].nbytes is None
    assert plan[0].operands[0] == (Value("float32", (None,)),)
    assert plan.totals.per_step == Total(communications=2, nbytes=8, unknown=1)


# --- Plans ---------------------------------------------------------------------------


def _row(primitive: str, nbytes: int | None, times: int | None) -> Row:
    return Row(
        primitive=primitive,
        reduction="",
        options={},
        group=(0, 1),
        operands=((), ()),
        links=(Link(0, 1, nbytes),),
        algorithm="direct",
        path=(),
        times=times,
        lines=("train.py:1 in step",),
        backward=False,
    )


def test_totals_by_hand() -> None:
    rows = (
        _row("message", 10, 1),
        _row("message", 7, 3),
        _row("message", None, 2),
        _row("message", 5, None),
        _row("broadcast", 100, None),
    )
    plan = Plan(rows, ("/device:CPU:0", "/device:CPU:1"))
    assert plan.totals.per_step == Total(6, 31, 2)
    assert plan.totals.per_turn == Total(2, 105, 0)
    assert list(plan.by_primitive) == ["broadcast", "message"]
    assert plan.by_primitive["message"].per_step == Total(6, 31, 2)
    assert plan.by_primitive["message"].per_turn == Total(1, 5, 0)
    assert plan.by_primitive["broadcast"].per_step == Total()


@pytest.mark.parametrize("seed", range(5))
def test_totals_are_the_sums_over_the_primitives(seed: int) -> None:
    plan = examples.made_up(50, 4, seed)
    for kind in ("per_step", "per_turn"):
        whole = getattr(plan.totals, kind)
        parts = [getattr(totals, kind) for totals in plan.by_primitive.values()]
        for name in ("communications", "nbytes", "unknown"):
            assert getattr(whole, name) == sum(getattr(p, name) for p in parts)


def test_a_plan_is_a_sequence_of_rows() -> None:
    plan = examples.made_up(5, 2)
    assert len(plan) == 5
    assert list(plan) == [plan[n] for n in range(5)] == list(plan.rows)
    assert plan[-2:] == plan.rows[3:]
    assert plan[0] in plan
    assert not Plan((), ())


# --- JSON ----------------------------------------------------------------------------


def test_json_gives_the_plan_back() -> None:
    for plan in (_plan(2, examples.everywhere), examples.made_up(40, 4)):
        assert Plan.from_json(plan.to_json()) == plan


def test_json_holds_what_follows_from_the_rows_too() -> None:
    plan = examples.made_up(9, 3)
    read = json.loads(plan.to_json())
    assert read["devices"] == list(plan.devices)
    assert [tuple(row["sent"]) for row in read["rows"]] == [r.sent for r in plan]
    assert [row["nbytes"] for row in read["rows"]] == [r.nbytes for r in plan]
    totals = read["totals"]["per_step"]
    assert totals["communications"] == plan.totals.per_step.communications


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"rows": [{}], "devices": []}', '{"rows": 3}']
)
def test_what_is_no_plan_is_an_error(text: str) -> None:
    with pytest.raises(errors.ArgumentError, match="not the JSON text of a plan") as e:
        Plan.from_json(text)
    assert "Fix: pass what `Plan.to_json` returned." in str(e.value)


# --- Optional packages ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "room", "use"),
    [
        ("rich", "display", lambda plan, folder: plan.print()),
        ("matplotlib", "lanes", lambda plan, folder: plan.plot(folder / "x.png")),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    package: str, room: str, use: Any, monkeypatch: Any, tmp_path: pathlib.Path
) -> None:
    monkeypatch.delitem(sys.modules, f"replicator.report.{room}", raising=False)
    monkeypatch.delattr(report, room, raising=False)
    for name in list(sys.modules):
        if name.partition(".")[0] == package:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(errors.DependencyError) as caught:
        use(examples.made_up(3, 2), tmp_path)
    assert isinstance(caught.value, ImportError)
    assert f"{package} is needed to" in str(caught.value)
    assert f"pip install {package}, or pip install 'replicator[plan]'" in str(
        caught.value
    )


def test_the_library_imports_neither_rich_nor_matplotlib() -> None:
    program = (
        "import sys\n"
        "sys.modules.update({'rich': None, 'matplotlib': None})\n"
        "import replicator, replicator.plan\n"
        "repl = replicator.Replicator(['CPU:0'])\n"
        "assert len(repl.build(lambda: repl.all_reduce(1.0)).plan) == 1\n"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        check=True,
        timeout=120,
    )
