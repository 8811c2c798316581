# SPDX-License-Identifier: Apache-2.0
"""What a step_fn reads by name, compared at each call with what the step was built of.

A notebook cell that creates a new model and optimizer binds their names to new objects;
`model.trainable = False`, `model.add` and `model.compile` change the object behind a
name. A built step would silently go on with the old ones.

Names are found in the code of step_fn, and of the user's functions and methods that it
reads in turn: globals, closures, attributes, and entries of dicts under constant keys.
What this code assigns itself is left out. For a Keras layer, the search adds the layers
that it contains, whether these are trainable, and what `compile` sets. The code of
libraries is not searched.

Objects are compared by identity, since comparing them takes as long for a large model
as for a number. Nothing here keeps a function, or what it reads, alive.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import inspect
import itertools
import sys
import types
import weakref
from collections.abc import Hashable, Iterable, Set
from typing import Any, NamedTuple

from replicator import errors
from replicator._tf import autograph, frames
from replicator._tf import variables as tf_variables
from replicator.step import cache

_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_STORES = ("STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "STORE_ATTR")
_MOST = 1000  # names; a step that reads more takes long anyway
_MOST_ENTRIES = 100  # of a list or dict that is searched for layers
_GONE_ERRORS = (AttributeError, LookupError, TypeError, ValueError)  # name or owner


class Change(NamedTuple):
    """A name that stands for another object, or another value, than it did.

    Attributes:
        name: The name, as in the code.
        description: How it changed, for messages.
        plain: Whether it was, and is, a number, text or the like.
    """

    name: str
    description: str
    plain: bool


class Names:
    """The objects that a step was built of, by the names under which it reads them.

    Args:
        step_fn: The user's function.
        ignored: Names to leave out.
    """

    def __init__(self, step_fn: Any, ignored: Set[str] = frozenset()) -> None:
        # Emptied when an object goes: its weak reference then equals a name's None.
        self._alive = alive = [True]
        self._dies = lambda _: alive.clear()
        self._objects: dict[str, Any] = {
            "alive": alive,
            "state": tf_variables.layer_state,
        }
        self._sources: list[tuple[str, str, str]] = []  # name, value now and before
        owners: dict[int, tuple[str, str]] = {}
        checks = ["alive"]
        for name, owner, path, value in _Search(step_fn, ignored).sources():
            local, reference = owners.get(id(owner), ("", ""))
            if not local:
                local, reference = f"o{len(owners)}", self._keep(owner)
                owners[id(owner)] = local, reference
                local = f"({local} := {reference})"
            recorded = self._keep(value)
            operator = "is" if path else "=="
            checks.append(f"{_value(local, path)} {operator} {recorded}")
            self._sources.append((name, _value(reference, path), recorded))
        # Compiled for these names, it takes some 50 ns for each, and 25 for a layer.
        self._compare = eval(f"lambda: {' and '.join(checks)}", self._objects)

    def _keep(self, value: Any) -> str:
        """Keeps an object, weakly where possible; returns the expression for it."""
        name = f"k{len(self._objects)}"
        if not type(value).__weakrefoffset__:
            self._objects[name] = value
            return name
        self._objects[name] = weakref.ref(value, self._dies)
        return f"{name}()"

    def is_unchanged(self) -> bool:
        """Whether all names stand for the same objects as before."""
        try:
            return bool(self._compare())
        except _GONE_ERRORS:
            return False

    def changes(self) -> list[Change]:
        """Returns what has changed, other than to an equal number or text."""
        changes = []
        for name, current, recorded in self._sources:
            old = eval(recorded, self._objects)
            is_gone = old is None and recorded.endswith("()")
            try:
                new = eval(current, self._objects)
            except _GONE_ERRORS:
                new = None
            description, old_key, new_key = (
                _OTHER_OBJECT,
                cache.plain(old),
                cache.plain(new),
            )
            plain = not is_gone and old_key is not None and new_key is not None
            if current.startswith(_STATE):
                is_same, description = old == new, _OTHER_LAYERS
            elif plain:
                is_same = old_key == new_key
                description = (
                    f"was {errors.repr_of(old)}{_AT_BUILD} and is {errors.repr_of(new)}"
                )
            else:
                is_same = old is new and not is_gone
            if not is_same:
                changes.append(Change(name, description, plain))
        return changes


_STATE = "state("
_AT_BUILD = " when the step was built"
_OTHER_OBJECT = f"is another object than{_AT_BUILD}"
_OTHER_LAYERS = f"has other layers, or trains others of them, than{_AT_BUILD}"


def _value(owner: str, path: str) -> str:
    """Returns the expression for a value of an owner; without a path, for its state."""
    return owner + path if path else f"{_STATE}{owner})"


class _Source(NamedTuple):
    """A value that code reads under a name.

    Attributes:
        name: The name, for messages.
        owner: The function, object or dict that has it.
        path: What follows the owner in an expression for the value, or "" if it is the
            state of a Keras layer.
        value: The value.
    """

    name: str
    owner: Any
    path: str
    value: Any


class _Search:
    """Searches the code of a function for the names that it reads.

    Args:
        step_fn: The function.
        ignored: Names to leave out.
    """

    def __init__(self, step_fn: Any, ignored: Set[str]) -> None:
        self._ignored = ignored
        self._sources: dict[tuple[int, str], _Source] = {}
        self._assigned: set[str] = set()  # by the code that was searched
        self._seen: set[Hashable] = set()
        self._kinds = _layer_types()
        self._value("", step_fn, _NO_READS)

    def sources(self) -> list[_Source]:
        """Returns what was found."""
        return [
            source
            for source in self._sources.values()
            if source.name not in self._ignored
            and source.name.rpartition(".")[2] not in self._assigned
        ]

    def _note(self, space: Any, *source: Any) -> None:
        """Notes a source, by the namespace that has it, which owners may share."""
        entry = _Source(*source)
        self._sources.setdefault((id(space), entry.path), entry)

    def _value(self, name: str, value: Any, reads: _Reads) -> None:
        """Searches a value that code reads under a name."""
        if len(self._sources) >= _MOST:
            return
        value = autograph.function_of(value)
        if isinstance(value, functools.partial):
            self._value(name, value.func, reads)
            self._values(name, [*value.args, *value.keywords.values()], reads)
        elif isinstance(value, types.MethodType):
            if isinstance(value.__self__, self._kinds):
                self._layer("self", value.__self__)
            self._function(value.__func__, value.__self__, name)
        elif isinstance(value, types.FunctionType):
            self._function(value, None, name)
        elif isinstance(value, self._kinds):
            self._layer(name, value)
            self._object(name, value, reads)
        elif isinstance(value, dict):
            for key in sorted(reads.constants.intersection(value)):
                path = f"[{key!r}]"
                self._note(value, name + path, value, path, value[key])
            self._values(name, value.values(), reads)
        elif isinstance(value, list | tuple):
            self._values(name, value, reads)
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            self._object(name, value, reads)

    def _values(self, name: str, values: Iterable[Any], reads: _Reads) -> None:
        for value in itertools.islice(values, _MOST_ENTRIES):
            if value is not None and not isinstance(value, dict | list | tuple):
                self._value(name, value, reads)

    def _function(self, function: Any, instance: Any, name: str) -> None:
        """Searches the code of a function or method, if it is the user's."""
        code = getattr(function, "__code__", None)
        if code is None or not frames.is_users(code.co_filename):
            return
        if not self._is_new(id(function), id(instance)):
            return
        reads = _reads(code)
        self._assigned |= reads.assigned
        variables = function.__globals__
        for read in sorted(reads.names & variables.keys()):
            if not isinstance(variables[read], types.ModuleType):
                path = f".__globals__[{read!r}]"
                self._note(variables, read, function, path, variables[read])
            self._value(read, variables[read], reads)
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        for index, (read, cell) in enumerate(cells):
            with contextlib.suppress(ValueError):  # an empty cell
                path = f".__closure__[{index}].cell_contents"
                self._note(function, read, function, path, cell.cell_contents)
                self._value(read, cell.cell_contents, reads)
        defaults = function.__defaults__ or ()
        self._values(
            name, [*defaults, *(function.__kwdefaults__ or {}).values()], reads
        )
        if instance is not None:
            self._value("self", instance, reads)

    def _object(self, name: str, value: Any, reads: _Reads) -> None:
        """Searches the attributes of an object that code reads."""
        if isinstance(value, types.ModuleType):
            if not frames.is_users(getattr(value, "__file__", None) or ""):
                return
        elif not self._is_new(id(value), reads):
            return
        attributes = vars(value)
        for read in sorted(reads.attributes):
            if read in attributes:
                self._attribute(name, value, read)
                self._value(f"{name}.{read}", attributes[read], reads)
        if isinstance(value, types.ModuleType):
            return
        for read in sorted(reads.attributes.union(_CALLS)):
            method = inspect.getattr_static(type(value), read, None)
            method = getattr(method, "__func__", getattr(method, "fget", method))
            if isinstance(method, types.FunctionType):
                self._function(method, value, name)

    def _attribute(self, name: str, owner: Any, read: str) -> None:
        path = f".__dict__[{read!r}]"
        self._note(owner, f"{name}.{read}", owner, path, vars(owner)[read])

    def _layer(self, name: str, layer: Any, is_part: bool = False) -> None:
        """Notes the state of a Keras layer, and searches all layers in it."""
        if len(self._sources) >= _MOST or not self._is_new(id(layer)):
            return
        for read in _COMPILED & vars(layer).keys():
            self._attribute(name, layer, read)
        with contextlib.suppress(*_GONE_ERRORS):  # a layer of an unknown kind
            state = tf_variables.layer_state(layer)
            if len(state) > 1 or not is_part:
                self._note(layer, name, layer, "", state)
        for part in tf_variables.layers_in(layer):
            text = f"{name}.{part.name}"
            self._layer(text, part, is_part=True)
            self._object(text, part, _NO_READS)

    def _is_new(self, *key: Hashable) -> bool:
        new = key not in self._seen
        self._seen.add(key)
        return new


class _Reads(NamedTuple):
    """What a piece of code reads and assigns.

    Attributes:
        names: Globals that it reads.
        attributes: Attributes that it reads, of whichever object.
        constants: Texts in it, which may be keys.
        assigned: Names and attributes that it assigns.
    """

    names: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    constants: frozenset[str] = frozenset()
    assigned: frozenset[str] = frozenset()


_NO_READS = _Reads()
_CALLS = ("__call__", "call")
# What `compile` sets, of Keras and of legacy Keras.
_COMPILED = {
    *("optimizer", "_compile_loss", "_compile_metrics"),
    *("compiled_loss", "compiled_metrics"),
}


def _reads(code: types.CodeType) -> _Reads:
    """Returns what code, and the functions defined in it, read and assign."""
    arguments: dict[str, set[str]] = collections.defaultdict(set)
    constants: set[str] = set()
    codes = [code]
    while codes:
        code = codes.pop()
        codes += [
            const for const in code.co_consts if isinstance(const, types.CodeType)
        ]
        constants.update(const for const in code.co_consts if isinstance(const, str))
        for instruction in dis.get_instructions(code):
            arguments[instruction.opname].add(instruction.argval)
    kinds = [
        frozenset().union(*(arguments[opname] for opname in opnames))
        for opnames in (_LOADS, _ATTRIBUTES, _STORES)
    ]
    return _Reads(kinds[0], kinds[1], frozenset(constants), kinds[2])


def _layer_types() -> tuple[type, ...]:
    """Returns the layers' base classes of Keras and legacy Keras, once imported."""
    modules = [sys.modules.get(name) for name in ("keras", "tf_keras")]
    layers: list[Any] = [getattr(module, "layers", None) for module in modules]
    return tuple(module.Layer for module in layers if hasattr(module, "Layer"))
