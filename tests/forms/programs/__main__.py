# SPDX-License-Identifier: Apache-2.0
"""Runs random programs by their numbers.

    python -m tests.forms.programs 17
    python -m tests.forms.programs 17 --small
    python -m tests.forms.programs 0 --count 100

The second leaves out computations that do not matter for a fault, and shows the rest.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import tensorflow as tf

from tests.forms.programs import inputs, running, sessions
from tests.forms.programs.random_programs import Program


def _door(name: str) -> running.Door:
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module), function)


def smaller(program: Program, door: running.Door, counts: list[int]) -> Program:
    """Returns a program of fewer computations that fails alike."""
    kind, details = running.outcome(program, door, counts)
    word = details.split(":")[1][:20] if kind == "error" else ""

    def fails(other: Program) -> bool:
        found, text = running.outcome(other, door, counts)
        return found == kind and word in text

    without = type(program)(program.seed, program.steps, False, program.length)
    program = without if fails(without) else program
    for step in list(program.steps):
        steps = [k for k in program.steps if k != step]
        other = type(program)(program.seed, steps, program.has_training, program.length)
        if fails(other):
            program = other
    return program


def show(program: Program) -> None:
    """Prints the steps of a program, and its graph if that is small."""
    print(
        f"seed {program.seed}, {inputs.kind(program.seed)}, steps {program.steps}, "
        f"trains {program.has_training}"
    )
    print("  ", [program.makers[k].__name__ for k in program.steps])
    variables = program.variables()
    function = tf.function(
        lambda *batch: program.step(variables, *batch),
        input_signature=program.signature,
        autograph=False,
    )
    operations = function.get_concrete_function().graph.get_operations()
    for op in operations if len(operations) < 80 else []:
        if op.type not in ("Const", "NoOp", "Placeholder"):
            print(
                f"    {op.name} = {op.type}({', '.join(t.name for t in op.inputs)})",
                [
                    t.shape.as_list() if t.shape.rank is not None else None
                    for t in op.outputs
                ],
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Runs random programs by their numbers."
    )
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--replicas", default="2,3")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--length", type=int, help="so many computations each")
    parser.add_argument("--forward", action="store_true", help="train nothing")
    parser.add_argument("--steps", help="only these, e.g. 0,3")
    parser.add_argument("--door", default="tests.forms.programs.doors.engine")
    parser.add_argument("--session", action="store_true", help="as a graph")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after these")
    arguments = parser.parse_args()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 3
    )
    door, counts = (
        _door(arguments.door),
        [int(k) for k in arguments.replicas.split(",")],
    )
    make = sessions.GraphProgram if arguments.session else Program
    found: collections.Counter[str] = collections.Counter()
    began = time.time()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        steps = (
            [int(k) for k in arguments.steps.split(",")] if arguments.steps else None
        )
        if arguments.session:
            door = sessions.of_setting(seed)
        program = make(seed, steps, not arguments.forward, arguments.length)
        kind, details = running.outcome(program, door, counts)
        found[kind] += 1
        if time.time() - began > arguments.seconds:
            break
        if seed % 10 == 0:
            print(f"{seed}, {time.time() - began:.0f} s", flush=True)
        if kind != "equal":
            print(f"{seed}: {kind}: {details}", flush=True)
            if arguments.small:
                show(smaller(program, door, counts))
        tf.keras.backend.clear_session()
    print(f"{sum(found.values())} programs, {time.time() - began:.0f} s: {dict(found)}")


if __name__ == "__main__":
    main()
