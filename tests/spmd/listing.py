# SPDX-License-Identifier: Apache-2.0
"""Prints a program as the step function that runs it.

`runner` executes this text, so that a failing program can be read, and pasted into a
file. It uses `repl`, `tf` and the functions of `runner.HELPERS`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from tests.spmd import program as p

Lines = list[str]


def source(program: p.Program) -> str:
    """Returns the functions of all bodies, and the step that calls them."""
    broken = dict(program.broken)
    lines = [f"# {program.num_replicas} replicas, {program.mode}"]
    for _, statement in p.walk(program.body):
        if isinstance(statement, p.Call) and statement.shared:
            lines += [*_definition(statement), ""]
    lines += _body("valid", program, program.body)
    for replica_id, body in broken.items():
        lines += ["", *_body(f"broken_{replica_id}", program, body)]
    lines += ["", "def step_fn():"]
    for replica_id in broken:
        lines += [
            f"    if repl.replica_id == {replica_id}:",
            f"        return broken_{replica_id}()",
        ]
    return "\n".join([*lines, "    return valid()", ""])


def _body(name: str, program: p.Program, body: p.Block) -> Lines:
    lines = ["r = repl.replica_id"]
    for data in program.inputs:
        lines += listed(data)
    watched, results = _tuple(program.watched), _tuple(program.results)
    body_lines = _statements(body.statements)
    if program.differentiate == "tape":
        lines += ["with tf.GradientTape() as tape:", f"    tape.watch({watched})"]
        lines += _indented([*body_lines, f"loss = loss_of{results}"])
        lines += [f"gradients = tape.gradient(loss, {watched}, **ZERO)"]
    elif program.differentiate:
        lines += [*body_lines, f"loss = loss_of{results}"]
        lines += [f"gradients = tf.gradients(loss, {watched}, **ZERO)"]
    else:
        lines += [*body_lines, "gradients = ()"]
    return _function(name, [], [*lines, f"return present{results}, gradients"])


def _function(name: str, arguments: Sequence[str], body: Lines) -> Lines:
    return [f"def {name}({', '.join(arguments)}):", *_indented(body)]


def _indented(lines: Iterable[str]) -> Lines:
    return ["    " + line for line in lines]


def _tuple(names: Sequence[str]) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _statements(statements: Iterable[p.Statement]) -> Lines:
    return [line for statement in statements for line in listed(statement)]


def _block(
    block: p.Block, like: Sequence[str] = (), before: Sequence[str] = ()
) -> Lines:
    """Returns the lines of a function's body; results keep the shape of `like`."""
    lines = _statements(block.statements)
    results = list(block.yields)
    if like:
        results = [
            f"like({name}, {other})" for name, other in zip(results, like, strict=True)
        ]
    return [*lines, f"return {', '.join([*before, *results])}"]


@functools.singledispatch
def listed(statement: Any) -> Lines:
    """Returns the Python lines of a statement."""
    raise TypeError(statement)


@listed.register
def _(statement: p.Data) -> Lines:
    shapes = set(statement.shapes)
    shape = shapes.pop() if len(shapes) == 1 else f"{list(statement.shapes)}[r]"
    suffix = "" if statement.known else ", known=False"
    return [
        f"{statement.target} = data({statement.dtype!r}, {shape}, "
        f"seed={statement.seed}{suffix})"
    ]


@listed.register
def _(statement: p.Local) -> Lines:
    sources = ", ".join(statement.sources)
    return [f"{statement.target} = {statement.function}({sources})"]


@listed.register
def _(statement: p.Collective) -> Lines:
    value = statement.source
    if statement.spec is not None:
        root = statement.option("root")
        value = f"{value} if r == {root} else {_spec(statement.spec)}"
    arguments = [value]
    for name, option in statement.options:
        if name in ("weight", "splits"):
            shown = f"{list(option)}[r]"
        else:
            shown = repr(option)
        arguments.append(f"{name}={shown}")
    call = f"repl.{statement.primitive}"
    if statement.owner is None:
        return _among(statement.target, call, arguments, statement.groups)
    both = f"extremum_{statement.target}"
    return [
        *_among(both, call, arguments, statement.groups),
        f"{statement.target}, {statement.owner} = {both} or (None, None)",
    ]


@listed.register
def _(statement: p.Barrier) -> Lines:
    return _among("_", "repl.barrier", [], statement.groups)


def _among(
    target: str,
    function: str,
    arguments: Sequence[str],
    groups: tuple[tuple[int, ...], ...] | None,
) -> Lines:
    """Returns a call by the members of some groups."""
    if groups is None:
        return [f"{target} = {function}({', '.join(arguments)})"]
    own = [list(group) for group in groups]
    if len(own) == 1:
        call = f"{function}({', '.join([*arguments, f'group={own[0]}'])})"
        return [f"{target} = {call} if r in {own[0]} else None"]
    return [f"{target} = {function}({', '.join([*arguments, f'group=groups({own})'])})"]


@listed.register
def _(statement: p.Send) -> Lines:
    call = f"repl.send({statement.source}, {statement.receiver}, tag={statement.tag})"
    return [f"if r == {statement.sender}:", f"    {call}"]


@listed.register
def _(statement: p.Recv) -> Lines:
    spec = statement.like or _spec(statement.spec)
    call = f"repl.recv({spec}, {statement.sender}, tag={statement.tag})"
    return [f"{statement.target} = {call} if r == {statement.receiver} else None"]


def _spec(spec: tuple[str, tuple[int | None, ...]]) -> str:
    dtype, shape = spec
    return f"tf.TensorSpec({list(shape)}, {dtype!r})"


def _number(number: p.Number) -> str:
    arguments = [str(number.constant)]
    if number.source is not None:
        arguments.append(number.source)
    arguments.append(f"below={number.below}")
    return f"agreed({', '.join(arguments)})"


@listed.register
def _(statement: p.Choose) -> Lines:
    lines, names = [], []
    for n, branch in enumerate(statement.branches):
        names.append(f"branch_{n}_{statement.targets[0]}")
        lines += _function(names[-1], [], _block(branch))
    number = _number(statement.number)
    if statement.switch:
        call = f"tf.switch_case({number}, [{', '.join(names)}])"
    else:
        call = f"tf.cond(tf.equal({number}, 0), {', '.join(names)})"
    return [*lines, f"{', '.join(statement.targets)} = {call}"]


@listed.register
def _(statement: p.Loop) -> Lines:
    name, turns = f"turn_{statement.targets[0]}", f"turns_{statement.targets[0]}"
    body = _block(statement.body, statement.initial, ["turn + 1"])
    results = ", ".join(["_", *statement.targets])
    initial = ", ".join(["0", *statement.initial])
    return [
        f"{turns} = {_number(statement.number)}",
        *_function(name, ["turn", *statement.arguments], body),
        f"{results} = tf.while_loop(",
        f"    lambda turn, *_: tf.less(turn, {turns}), {name}, [{initial}]",
        ")",
    ]


@listed.register
def _(statement: p.Map) -> Lines:
    name = f"row_of_{statement.target}"
    return [
        *_function(name, [statement.row], _block(statement.body)),
        f"{statement.target} = tf.map_fn("
        f"{name}, {statement.source}, fn_output_signature=tf.{statement.dtype})",
    ]


@listed.register
def _(statement: p.Scan) -> Lines:
    name = f"state_of_{statement.target}"
    body = _block(statement.body, [statement.initial])
    function = "tf.foldl" if statement.fold else "tf.scan"
    return [
        *_function(name, [statement.state, statement.row], body),
        f"{statement.target} = {function}("
        f"{name}, {statement.source}, initializer={statement.initial})",
    ]


@listed.register
def _(statement: p.Call) -> Lines:
    lines = [] if statement.shared else _definition(statement)
    arguments = statement.initial
    for _ in range(statement.times):
        call = f"{_called(statement)}({', '.join(arguments)})"
        lines.append(f"{', '.join(statement.targets)} = {call}")
        arguments = statement.targets
    return lines


def _called(statement: p.Call) -> str:
    return f"function_{statement.targets[0]}"


def _definition(statement: p.Call) -> Lines:
    body = ["r = repl.replica_id", *_block(statement.body, statement.arguments)]
    function = _function(_called(statement), statement.arguments, body)
    return ["@tf.function(autograph=False)", *function]
