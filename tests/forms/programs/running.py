# SPDX-License-Identifier: Apache-2.0
"""Runs programs on one device and on replicas, and compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tests.forms.programs import inputs
from tests.forms.programs.random_programs import Program

NOT_BUILT = "not built by TensorFlow"
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "mixed": 3e-2}
# Given a step, a function that makes its variables, a signature and a number of
# replicas: returns the variables and a function of a batch (doors.py).
Door = Callable[[Any, Any, Any, int], tuple[dict[str, Any], Any]]


@dataclasses.dataclass
class Results:
    """What a program made: of each batch, and its variables behind it."""

    steps: list[tuple[Any, dict[str, np.ndarray]]]


def run(
    program: Program, door: Door | None = None, count: int = 1, noise: float = 0
) -> Results:
    """Runs two steps of a program.

    Args:
        program: The program.
        door: What runs it; None: one device.
        count: The number of replicas.
        noise: By how much, relatively, arguments are changed.
    """
    variables, function = (door or program.one_device)(
        program.step, program.variables, program.signature, count
    )
    steps, rng = [], np.random.default_rng(0)
    for batch in program.batches():
        if noise:
            batch = [
                a * (1 + noise * rng.normal(size=a.shape)) if a.dtype.kind == "f" else a
                for a in batch
            ]
        given = [
            tf.constant(a, s.dtype)
            for a, s in zip(batch, program.signature, strict=True)
        ]
        made = tf.nest.map_structure(np.asarray, function(*given))
        steps.append((made, {k: np.asarray(v) for k, v in variables.items()}))
    return Results(steps)


def largest(found: Results, right: Results) -> tuple[float, str]:
    """Returns the largest difference, relative where values are large, and of what."""
    worst, places = 0.0, []
    steps = zip(found.steps, right.steps, strict=True)
    for k, (one, other) in enumerate(steps):
        tf.nest.assert_same_structure(one, other)
        flat = tf.nest.flatten(one), tf.nest.flatten(other)
        for name, a, b in zip(_paths(other), *flat, strict=True):
            difference = _difference(np.asarray(a), np.asarray(b))
            worst = max(worst, difference)
            if difference > 1e-10:
                text = f"{_short(a)}, not {_short(b)}"
                places.append(f"step {k}, {name} ({difference:.0e}): {text}")
    return worst, "; ".join(places[:6])


def _paths(nest: Any, path: str = "") -> list[str]:
    if isinstance(nest, dict):
        return [p for k in sorted(nest) for p in _paths(nest[k], f"{path}/{k}")]
    if isinstance(nest, (list, tuple)):
        return [p for k, one in enumerate(nest) for p in _paths(one, f"{path}/{k}")]
    return [path]


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return np.inf
    if b.dtype.kind != "f":
        return 0.0 if np.array_equal(a, b) else np.inf
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        by = np.where(same, 0, np.abs(a - b) / (1 + np.abs(b)))
    return float(np.max(np.where(np.isnan(by), np.inf, by), initial=0))


def _short(a: Any) -> str:
    a = np.asarray(a)
    return f"{a.shape}{a.ravel()[:4]}"


def problem(program: Program, right: Results, door: Door, count: int) -> str | None:
    """Returns how replicas differ from one device, or None."""
    tolerance = TOLERANCES[inputs.kind(program.seed)]
    found = run(program, door, count)
    difference, where = largest(found, right)
    if difference <= tolerance:
        return None
    # A program that multiplies rounding is no evidence: noise does the same.
    noise = {"float64": 1e-14, "float32": 1e-6, "mixed": 5e-4}[
        inputs.kind(program.seed)
    ]
    changed, _ = largest(run(program, noise=noise), right)
    if difference < 30 * changed and np.isfinite(difference):
        return None
    return f"{difference:.1e} in {where} (noise: {changed:.0e})"


def outcome(program: Program, door: Door, counts: Sequence[int]) -> tuple[str, str]:
    """Returns what becomes of a program, in a word, and the details."""
    try:
        right = run(program)
    except Exception as error:
        return NOT_BUILT, cause(error)
    for count in counts:
        try:
            fault = problem(program, right, door, count)
        except Exception as error:
            return "error", f"{count} replicas: {cause(error)}"
        if fault:
            return "different", f"{count} replicas: {fault}"
    return "equal", ""


def cause(error: BaseException) -> str:
    """Returns an error in a line, and where in the library it was raised."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "/replicator/forms/" in code.co_filename:
            frames.append(f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}")
        trace = trace.tb_next
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text} [{' '.join(frames[-3:])}]"
