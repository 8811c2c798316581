# SPDX-License-Identifier: Apache-2.0
"""No bad input causes an error from inside the library, or another library's text."""

from __future__ import annotations

import inspect
import os
import re

import pytest

import replicator
from docs._ext import names
from tests.bad_inputs import cases, judge, programs, workers

# The first findings, by program, value and mode.
KNOWN = {
    "an open file": ("calibration=bad)", "True", "eager"),
    "huge rates": (
        "calibration=written(bad)",
        "rates/cpu/op=10000000000000000000",
        "eager",
    ),
    "deep rates": ("calibration=written(bad)", "deep value", "eager"),
    "deep plan": ("looked_at(", "deep", "eager"),
    "a plan of other types": ("looked_at(", "rows/0/times=[1]", "eager"),
    "integer gradients": ("keras.apply_gradients([(bad, v)])", "int tensor", "eager"),
    "no gradients": ("keras.apply_gradients(bad)", "[]", "function"),
    "no function": ("repl.run(bad)", "None", "graph"),
    "steps past int32": ("steps_per_call=bad", "2147483648", "eager"),
    "devices past memory": (
        "replicator.Replicator(bad)",
        "['CPU:0', 'CPU:1000000']",
        "eager",
    ),
    "a group of objects": ("repl.barrier(bad)", "all raises", "eager"),
    "outside a step": ("repl.linked(bad)", "1.5", "outside"),
    "another graph's tensor": (
        "repl.all_reduce(bad)",
        "tensor of another graph",
        "graph",
    ),
    "text that is not printed": ("repl.send(x, 1, bad)", "'\\udc80'", "eager"),
    "a long text": ("repl.all_reduce(x, bad)", "long text", "eager"),
}


@pytest.mark.battery(3)
@pytest.mark.parametrize(("line", "value", "mode"), KNOWN.values(), ids=KNOWN)
def test_what_was_found_first_is_right(line: str, value: str, mode: str) -> None:
    (case,) = [
        case
        for case in cases.every()
        if line in case.program.line and case.value == value and case.mode == mode
    ][:1]
    verdict = judge.run(case)
    assert not verdict.startswith("BAD"), f"{case.name}: {verdict}"


def test_each_method_with_arguments_has_a_program() -> None:
    lines = "\n".join(program.line for program in programs.PROGRAMS)
    without = {
        name
        for name in names.methods()
        if callable(method := getattr(replicator.Replicator, name))
        and len(inspect.signature(method).parameters) > 1
        and f"repl.{name}(" not in lines
    }
    assert without == set()


def test_cases_are_told_apart_by_their_names() -> None:
    known = [case.name for case in cases.every()]
    assert len(set(known)) == len(known)


def test_a_sample_is_right(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # some values name files that are written
    sample = [case for case in cases.sample(500, seed=5) if not case.cold]
    verdicts = {case.name: judge.run(case) for case in sample[:80]}
    bad = {
        name: verdict for name, verdict in verdicts.items() if verdict.startswith("BAD")
    }
    assert not bad
    assert {"accepted", "refused"} <= set(verdicts.values())


@pytest.mark.slow
def test_two_thousand_are_right() -> None:
    verdicts = workers.run(2000, seed=1)
    assert len(verdicts) == 2000
    assert not {name: v for name, v in verdicts.items() if v.startswith("BAD")}


# --- The judge -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("replicator.errors.compose(bad, 1)", "BAD: .*TypeError"),
        ("raises(replicator.errors.ArgumentError('no'))", "BAD: no way out"),
        ("raises(replicator.errors.ArgumentError('no\\nFix: x'))", "BAD: no line"),
        ("raises(replicator.errors.ArgumentError('x' * 5000))", "BAD: a message of"),
        ("raises(KeyError('of the user'))", "user's own"),
        ("closes()", "BAD: file descriptor 2 is closed"),
        ("tf.identity(1.0)", "accepted"),
    ],
)
def test_the_judge_tells_bad_from_right(line: str, said: str, monkeypatch) -> None:
    def raises(error: Exception) -> None:
        raise error

    def closes() -> None:
        os.close(2)

    monkeypatch.setattr(
        cases,
        "namespace",
        lambda case, own=cases.namespace: (
            own(case) | {"raises": raises, "closes": closes}
        ),
    )
    saved_fd = os.dup(2)
    try:
        verdict = judge.run(
            cases.Case(programs.Program(line, ("eager",)), "eager", "1")
        )
    finally:
        os.dup2(saved_fd, 2)
        os.close(saved_fd)
    assert re.match(said, verdict)
