# SPDX-License-Identifier: Apache-2.0
"""The output of `Plan.print`."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from typing import Any

import pytest
import tensorflow as tf

from replicator import errors
from replicator.graph.ir.placeholder import Value
from replicator.graph.lowering.record import Link
from replicator.plan import Plan, Row
from replicator.report import display, units
from tests import helpers, paper_hosts
from tests.report import examples


def _printed(plan: Plan) -> str:
    file = io.StringIO()
    plan.print(file)
    return file.getvalue()


def _row(**changes: Any) -> Row:
    return dataclasses.replace(examples.made_up(1, 3)[0], group=(0, 1, 2), **changes)


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (units.size, 0, "0 B"),
        (units.size, 1023, "1023 B"),
        (units.size, 1024, "1.0 KiB"),
        (units.size, 1536, "1.5 KiB"),
        (units.size, 3 * 2**20, "3.0 MiB"),
        (units.size, 5 * 2**30, "5.0 GiB"),
        (units.size, 2**60, "1048576.0 TiB"),
        (units.size, None, "?"),
        (units.duration, 0.0, "0 ms"),
        (units.duration, 0.0123456, "12.3 ms"),
        (units.duration, 1.5, "1.50 s"),
    ],
)
def test_numbers_are_shown_in_their_unit(form: Any, value: Any, text: str) -> None:
    assert form(value) == text


def test_a_row_is_called_by_what_the_replicas_agreed_on() -> None:
    row = _row(primitive="reduce", reduction="sum", options={"root": 1})
    assert display.title(row) == "reduce sum root=1"
    assert display.title(_row(primitive="barrier", options={})) == "barrier"


def test_replicas_that_hand_in_or_send_alike_are_named_together() -> None:
    floats = (Value("float32", (2, None)),)
    row = _row(operands=((), floats, floats), links=(Link(1, 0, 5), Link(2, 0, 5)))
    assert display.tensors(row) == "0: nothing\n1, 2: float32[2, ?]"
    assert display.sent(row) == "0: 0 B\n1, 2: 5 B"
    alike = dataclasses.replace(row, operands=(floats,) * 3, links=())
    assert (display.tensors(alike), display.sent(alike)) == ("float32[2, ?]", "0 B")


def test_many_tensors_are_counted() -> None:
    many = tuple(Value("int32", (n,)) for n in range(5))
    expected = "int32[0], int32[1], int32[2], 2 more"
    assert display.tensors(_row(operands=(many,) * 3)) == expected


def test_the_tables_of_a_step() -> None:
    repl = helpers.make(2, algorithm=None)
    lines = _printed(repl.build(examples.everywhere(repl)).plan).splitlines()
    shown = [" ".join(line.split()) for line in lines]
    assert "Communication of 2 replicas" in shown
    (first,) = (line for line in shown if line.startswith("0 all_reduce mean"))
    assert "all_reduce mean all float32[2] 8 B hub top level 1 forward tests" in first
    (third,) = (line for line in shown if line.startswith("2 broadcast"))
    assert "function inner >" in third and "? forward" in third
    assert sum(" backward " in line for line in shown) == 4
    # 8 top-level all_reduces (6 of them in the loop) of 16 bytes, and one elsewhere.
    start = shown.index("Totals over all replicas")
    totals = {line.split()[0]: line for line in shown[start:] if line}
    assert totals["all_reduce"] == "all_reduce 8 128 B 2 32 B"
    assert totals["broadcast"] == "broadcast - - 1 8 B"
    assert totals["all"].startswith("all 8 128 B 5 ")


def test_unknown_sizes_show_in_the_totals() -> None:
    row = _row(times=1, links=(Link(0, 1, None), Link(0, 2, 4)), path=())
    text = _printed(Plan((row,), ("/device:CPU:0",) * 3))
    assert "0 B and 1 of unknown size" in text


def test_what_looks_like_markup_is_printed_as_it_is() -> None:
    row = _row(lines=("train.py:1 in [bold]step[/bold]",))
    assert "[bold]step[/bold]" in _printed(Plan((row,), ("/device:CPU:0",) * 3))


@pytest.mark.parametrize(
    ("number", "shown"),
    [(1, ["0"]), (4, ["0", "1", "2", "3"]), (6, ["0", "1", "2", "and 3 more lines"])],
)
def test_of_many_lines_the_first_are_shown(number: int, shown: list[str]) -> None:
    assert display.lines(_row(lines=tuple(map(str, range(number))))) == shown


def test_an_empty_plan_prints() -> None:
    assert "Communication of 2 replicas" in _printed(Plan((), ("CPU:0", "CPU:1")))


def test_standard_output_is_the_default(capsys: Any) -> None:
    plan = examples.made_up(3, 2)
    plan.print()
    assert capsys.readouterr().out == _printed(plan)


@pytest.mark.parametrize("notebook", [False, True])
def test_a_file_receives_plain_text(
    monkeypatch: pytest.MonkeyPatch, notebook: bool
) -> None:
    plan = examples.made_up(3, 2)
    plain = _printed(plan)
    monkeypatch.setenv("FORCE_COLOR", "1")  # concerns standard output
    monkeypatch.setattr("rich.console._is_jupyter", lambda: notebook)  # so does this
    assert _printed(plan) == plain
    assert "Communication of 2 replicas" in plain and "\x1b" not in plain


# --- Several hosts --------------------------------------------------------------------


def _of_hosts(layout: tuple[int, ...]) -> Plan:
    repl = paper_hosts.make(layout, algorithm="hub")
    with tf.Graph().as_default():
        repl.run(lambda: repl.all_reduce(helpers.opaque(tf.ones([1 << 18]))))
    return repl.plan


def test_bytes_within_and_between_hosts_and_the_slowest_link() -> None:
    plan = _of_hosts(paper_hosts.TWO_BY_TWO)
    assert (plan[0].within, plan[0].between) == (4 << 20, 2 << 20)
    shown = " ".join(_printed(plan).split())
    assert "Communication of 4 replicas on 2 hosts" in shown
    assert "4.0 MiB 2.0 MiB" in shown and "hub of hosts" in shown
    slowest = plan.slowest_link
    assert slowest is not None and plan.seconds is not None
    ends = [plan.hosts[host] for host in (slowest.source, slowest.destination)]
    took = units.duration(slowest.seconds)
    assert (
        f"Slowest link: {' to '.join(ends)}, {took} for 1.0 MiB in 1 message." in shown
    )
    assert f"Communication takes {units.duration(plan.seconds)} a step" in shown


def test_one_host_is_shown_as_ever() -> None:
    plan = _of_hosts((0, 0))
    assert plan.hosts == ("/job:worker/replica:0/task:0",)
    shown = _printed(plan)
    assert "each sends" in shown
    for word in ("hosts", "takes", "link"):
        assert word not in shown
    facts = json.loads(plan.to_json())["rows"][0]
    assert "wires" not in facts and "seconds" not in facts
    assert plan.slowest_link is None and plan.seconds is None


def test_plans_of_hosts_are_kept_as_json() -> None:
    plan = _of_hosts(paper_hosts.UNEVEN)
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).slowest_link == plan.slowest_link
    bad = [
        text.replace('"source": 2', '"source": 9'),
        re.sub(r'"seconds": [0-9.e-]+', '"seconds": -1.0', text),
        re.sub(r'"seconds": [0-9.e-]+', '"seconds": NaN', text),
    ]
    for changed in bad:
        assert changed != text
        with pytest.raises(errors.ArgumentError, match="not the JSON text of a plan"):
            Plan.from_json(changed)
