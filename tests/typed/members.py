# SPDX-License-Identifier: Apache-2.0
"""Finds which members of our classes a program uses, by the types that mypy infers.

Every value whose member the program uses is put into a `reveal_type`. A member counts
only where mypy knows the type of the value: what is Any is no use.
"""

from __future__ import annotations

import ast
import builtins
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping

import replicator
from replicator import compressors, plan, strategy

_MODULES = (replicator, compressors, plan, strategy)
_NAMES = {module.__name__.rpartition(".")[2]: module for module in _MODULES}
_NOTE = re.compile(r'^.*?:(\d+): note: Revealed type is "(.*)"$', re.MULTILINE)
_CLASS = re.compile(r"(?:^|fallback=|\| )(replicator(?:\.\w+)+)")

Used = set[tuple[type, str]]


def used(text: str, check: Callable[[str], str]) -> Used:
    """Returns the members that a program uses, or overrides in classes of its own.

    A member of a class counts for the classes that it inherits from, too.

    Args:
        text: The program.
        check: Returns mypy's output for a program.
    """
    tree = ast.parse(text)
    uses = [*_uses_of_classes(tree)]
    revealing = ast.unparse(ast.fix_missing_locations(_Revealer().visit(tree)))
    # On lines of their own: mypy drops a message that repeats another of its line.
    revealing = revealing.replace("reveal_type(", "reveal_type(\n")
    members = _revealed_members(revealing)
    for line, kind in _NOTE.findall(check(revealing)):
        member = members[int(line)]
        uses += [(pkgutil.resolve_name(name), member) for name in _CLASS.findall(kind)]
    return {(base, name) for cls, name in uses for base in cls.__mro__}


class _Revealer(ast.NodeTransformer):
    """Puts values whose members are used, and those that are called, in reveal_type."""

    def __init__(self) -> None:
        self._imported: set[str] = set()

    def visit_alias(self, node: ast.alias) -> ast.AST:
        self._imported.add(node.asname or node.name)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return node  # in an annotation, there are no values

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        returns, node.returns = node.returns, None
        self.generic_visit(node)
        node.returns = returns
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        self.generic_visit(node)  # f"{a} {b}" becomes str((a, b)), for its lines
        values = [v.value for v in node.values if isinstance(v, ast.FormattedValue)]
        return ast.Call(_name("str"), [ast.Tuple(values, ast.Load())], [])

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        is_module = isinstance(node.value, ast.Name) and node.value.id in self._imported
        if not is_module and isinstance(node.ctx, ast.Load):
            node.value = _reveal(node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and not hasattr(builtins, node.func.id):
            node.func = _reveal(node.func)
        return node


def _reveal(value: ast.expr) -> ast.expr:
    return ast.Call(_name("reveal_type"), [value], [])


def _name(name: str) -> ast.expr:
    return ast.Name(name, ast.Load())


def _revealed_members(text: str) -> Mapping[int, str]:
    """Returns the member that is used of each revealed value, by the value's line."""
    members = {}
    for node in ast.walk(ast.parse(text)):
        value, member = getattr(node, "value", None), getattr(node, "attr", "")
        if isinstance(node, ast.Call):
            value, member = node.func, "__call__"
        if isinstance(value, ast.Call) and getattr(value.func, "id", "") == (
            "reveal_type"
        ):
            members[value.args[0].lineno] = member
    return members


def _uses_of_classes(tree: ast.AST) -> Iterator[tuple[type, str]]:
    """Yields what is used of our classes themselves, and overridden by subclasses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            cls = _public_class(node.value)
            if cls is not None:
                yield cls, node.attr
        if isinstance(node, ast.ClassDef):
            for base in filter(None, map(_public_class, node.bases)):
                for member in node.body:
                    yield base, getattr(member, "name", "")


def _public_class(node: ast.expr) -> type | None:
    """Returns the class that is named as in `plan.Plan`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        value = getattr(_NAMES.get(node.value.id), node.attr, None)
        return value if isinstance(value, type) else None
    return None
