# SPDX-License-Identifier: Apache-2.0
"""What a step_fn reads by name, compared at each call with what the step was built of.

A notebook's cell that makes model and optimizer anew binds their names to other
objects; `model.trainable = False`, `model.add` and `model.compile` change the object
behind a name. A built step would silently go on with the old ones.

Names are found in the code of step_fn, and of the user's functions and methods that it
reads in turn: globals, closures, attributes, and entries of dicts under constant keys.
What this code assigns itself is left out. Of Keras layers in them, further: which parts
they have, and whether they are trainable. The code of libraries is not searched.

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
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from replicator import _tf
from replicator.step import cache

_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_STORES = ("STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "STORE_ATTR")
_MOST = 1000  # names; a step that reads more takes long anyway
_MOST_ENTRIES = 100  # of a list or dict that is searched for layers
_cell = attrgetter("cell_contents")


class Change(NamedTuple):
    """A name that stands for another object, or another value, than it did.

    Attributes:
        name: The name, as in the code.
        old: Its previous value if that is a number or text, else None.
        new: Its value.
        plain: Whether both are numbers, text or the like.
    """

    name: str
    old: Any
    new: Any
    plain: bool


class Names:
    """The objects that a step was built of, by the names under which it reads them.

    Args:
        step_fn: The user's function.
        ignored: Names to leave out.
    """

    def __init__(self, step_fn: Any, ignored: Set[str] = frozenset()) -> None:
        self._sources = _Search(step_fn, ignored).sources()
        self._gets = [get for get, _ in self._sources]
        values = self._values()
        self._ids = [*map(id, values)]
        self._alive = True
        dies = functools.partial(_note_death, weakref.ref(self))
        self._kept = [
            weakref.ref(value, dies) if type(value).__weakrefoffset__ else value
            for value in values
        ]

    def same(self) -> bool:
        """Whether all names stand for the same objects as before; takes about 1 us."""
        if not self._gets:
            return True
        try:
            return [*map(id, self._values())] == self._ids and self._alive
        except _GONE:
            return False

    def changes(self) -> list[Change]:
        """Returns what has changed, other than to an equal number or text."""
        kept, found = iter(self._kept), []
        for source in self._sources:
            try:
                values = list(source.get())
            except _GONE:
                values = [None] * len(source.names)
            for name, new in zip(source.names, values, strict=True):
                old = next(kept)
                old_key, new_key = cache.plain(old), cache.plain(new)
                if isinstance(old, weakref.ref):
                    same = old() is new
                else:
                    same = old is new or (old_key is not None and old_key == new_key)
                if not same:
                    is_plain = old_key is not None and new_key is not None
                    found.append(Change(name, old if is_plain else None, new, is_plain))
        return found

    def _values(self) -> list[Any]:
        values: list[Any] = []
        for get in self._gets:
            values += get()
        return values


_GONE = (AttributeError, LookupError, TypeError, ValueError)  # a name, or who has it


def _note_death(names: Callable[[], Any], _: Any) -> None:
    """Has Names compared in full: a new object may have the id of one that is gone."""
    found = names()
    if found is not None:
        found._alive = False


class _Source(NamedTuple):
    """Some names of one owner, which is held weakly.

    Attributes:
        get: Returns the values of the names.
        names: The names, for messages.
    """

    get: _Get
    names: Sequence[str]


class _Search:
    """Searches the code of a function for the names that it reads.

    Args:
        step_fn: The function.
        ignored: Names to leave out.
    """

    def __init__(self, step_fn: Any, ignored: Set[str]) -> None:
        self._ignored = ignored
        # (kind, id of the owner or of its namespace) -> owner, {key: name}
        self._found: dict[tuple[str, int], tuple[Any, dict[Any, str]]] = {}
        self._layers: dict[Any, str] = {}  # those with weights
        self._inner: set[int] = set()  # layers in containers of others, by their ids
        self._stored: set[str] = set()  # by the code that was searched
        self._seen: set[Hashable] = set()
        self._kinds = _keras("layers.Layer")
        self._parts = self._kinds + _keras(
            "optimizers.Optimizer", "losses.Loss", "metrics.Metric"
        )
        self._left = _MOST
        self._value("", step_fn, _NOTHING)

    def sources(self) -> list[_Source]:
        """Returns what was found, by owner."""
        sources = []
        for (kind, _), (owner, names) in self._found.items():
            kept = {
                key: name
                for key, name in names.items()
                if name not in self._ignored
                and name.rpartition(".")[2] not in self._stored
            }
            if kept:
                get = _GETTERS[kind](owner, _items(list(kept)))
                sources.append(_Source(get, list(kept.values())))
        if self._layers and "trainable" not in self._stored:
            get = _tf.read_trainable([weakref.ref(layer) for layer in self._layers])
            texts = [f"{name}.trainable" for name in self._layers.values()]
            sources.append(_Source(get, texts))
        return sources

    def _note(self, kind: str, owner: Any, space: Any, key: Any, name: str) -> None:
        self._left -= 1
        _, names = self._found.setdefault((kind, id(space)), (owner, {}))
        names[key] = name

    def _value(self, name: str, value: Any, reads: _Reads) -> None:
        """Searches a value that code reads under a name."""
        if self._left <= 0:
            return
        value = _tf.function_of(value)
        if isinstance(value, functools.partial):
            self._value(name, value.func, reads)
            self._each(name, [*value.args, *value.keywords.values()], reads)
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
            for key in reads.constants.intersection(value):
                self._note("entry", value, value, key, f"{name}[{key!r}]")
            self._each(name, value.values(), reads)
        elif isinstance(value, list | tuple):
            self._each(name, value, reads)
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            self._object(name, value, reads)

    def _each(self, name: str, values: Iterable[Any], reads: _Reads) -> None:
        for value in itertools.islice(values, _MOST_ENTRIES):
            if value is not None and not isinstance(value, dict | list | tuple):
                self._value(name, value, reads)

    def _function(self, function: Any, own: Any, name: str) -> None:
        """Searches the code of a function or method, if it is the user's."""
        code = getattr(function, "__code__", None)
        if code is None or not _tf.is_users(code.co_filename):
            return
        if not self._is_new(id(function), id(own)):
            return
        reads = _reads(code)
        self._stored |= reads.stored
        variables = function.__globals__
        for read in reads.names & variables.keys():
            if not isinstance(variables[read], types.ModuleType):
                self._note("global", function, variables, read, read)
            self._value(read, variables[read], reads)
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        for index, (read, cell) in enumerate(cells):
            with contextlib.suppress(ValueError):  # an empty cell
                self._value(read, cell.cell_contents, reads)
                self._note("cell", function, function.__closure__, index, read)
        defaults = function.__defaults__ or ()
        self._each(name, [*defaults, *(function.__kwdefaults__ or {}).values()], reads)
        if own is not None:
            self._value("self", own, reads)

    def _object(self, name: str, value: Any, reads: _Reads) -> None:
        """Searches the attributes of an object that code reads."""
        if isinstance(value, types.ModuleType):
            if not _tf.is_users(getattr(value, "__file__", None) or ""):
                return
        elif not self._is_new(id(value), reads):
            return
        own = vars(value)
        for read in sorted(reads.attributes):
            if read in own:
                kind, owner = "attribute", value
                if not type(value).__weakrefoffset__:
                    kind, owner = "entry", own
                self._note(kind, owner, owner, read, f"{name}.{read}")
                self._value(f"{name}.{read}", own[read], reads)
        if isinstance(value, types.ModuleType):
            return
        for read in sorted(reads.attributes.union(_CALLS)):
            method = inspect.getattr_static(type(value), read, None)
            method = getattr(method, "__func__", getattr(method, "fget", method))
            if isinstance(method, types.FunctionType):
                self._function(method, value, name)

    def _layer(self, name: str, layer: Any) -> None:
        """Notes the parts of a Keras layer, and all layers in it."""
        if self._left <= 0 or not self._is_new(id(layer)):
            return
        inner: list[Any] = []
        for read, value in list(vars(layer).items()):
            if isinstance(value, self._parts):
                self._note("attribute", layer, layer, read, f"{name}.{read}")
                inner += [value] if isinstance(value, self._kinds) else []
            elif isinstance(value, list | tuple | dict):
                parts = value.values() if isinstance(value, dict) else value
                layers = [part for part in parts if isinstance(part, self._kinds)]
                new = {*map(id, layers)} - self._inner
                if new and not read.startswith("_self_"):  # TensorFlow's own lists
                    self._inner |= new
                    self._note("length", layer, layer, read, f"{name}.{read}")
                    inner += layers
        # Those of libraries hand the attribute on to the layers in them.
        is_outer = inner and type(layer).__module__.startswith(_KERAS)
        if layer.weights and not is_outer and _tf.has_trainable(layer):
            self._left -= 1
            self._layers[layer] = name
        for part in inner:
            self._value(f"{name}.{part.name}", part, _NOTHING)

    def _is_new(self, *what: Hashable) -> bool:
        new = what not in self._seen
        self._seen.add(what)
        return new


class _Reads(NamedTuple):
    """What a piece of code reads and assigns.

    Attributes:
        names: Globals that it reads.
        attributes: Attributes that it reads, of whichever object.
        constants: Texts in it, which may be keys.
        stored: Names and attributes that it assigns.
    """

    names: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    constants: frozenset[str] = frozenset()
    stored: frozenset[str] = frozenset()


_NOTHING = _Reads()
_CALLS = ("__call__", "call")
_KERAS = ("keras.", "tf_keras.")


def _reads(code: types.CodeType) -> _Reads:
    """Returns what code, and the functions defined in it, read and assign."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    constants: set[str] = set()
    codes = [code]
    while codes:
        code = codes.pop()
        codes += [
            const for const in code.co_consts if isinstance(const, types.CodeType)
        ]
        constants.update(const for const in code.co_consts if isinstance(const, str))
        for instruction in dis.get_instructions(code):
            found[instruction.opname].add(instruction.argval)
    kinds = [
        frozenset().union(*(found[opname] for opname in opnames))
        for opnames in (_LOADS, _ATTRIBUTES, _STORES)
    ]
    return _Reads(kinds[0], kinds[1], frozenset(constants), kinds[2])


_Get = Callable[[], Iterable[Any]]
_Items = Callable[[Any], Iterable[Any]]


def _items(keys: Sequence[Any]) -> _Items:
    """Returns a function that looks up keys: their values, in order."""
    if len(keys) > 1:
        return itemgetter(*keys)
    (key,) = keys
    return lambda owner: (owner[key],)


def _of_globals(owner: Any, items: _Items) -> _Get:
    function = weakref.ref(owner)
    return lambda: items(function().__globals__)  # type: ignore[union-attr]


def _of_cells(owner: Any, items: _Items) -> _Get:
    function = weakref.ref(owner)
    return lambda: map(_cell, items(function().__closure__))  # type: ignore[union-attr]


def _of_attributes(owner: Any, items: _Items) -> _Get:
    value = weakref.ref(owner)
    return lambda: items(value().__dict__)


def _of_lengths(owner: Any, items: _Items) -> _Get:
    value = weakref.ref(owner)
    # Python has one object for each small number, of which ids are compared.
    return lambda: [len(part) % 256 for part in items(value().__dict__)]


def _of_entries(owner: Any, items: _Items) -> _Get:
    return lambda: items(owner)  # to which nothing can refer weakly


_GETTERS = {
    "global": _of_globals,
    "cell": _of_cells,
    "attribute": _of_attributes,
    "length": _of_lengths,
    "entry": _of_entries,
}


def _keras(*names: str) -> tuple[type, ...]:
    """Returns classes of Keras and legacy Keras, as far as they are imported."""
    kinds = []
    for module in map(sys.modules.get, ("keras", "tf_keras")):
        for name in names:
            with contextlib.suppress(AttributeError):  # where it is not imported
                kinds.append(attrgetter(name)(module))
    return tuple(kinds)
