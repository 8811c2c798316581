# SPDX-License-Identifier: Apache-2.0
"""Unexpected values: by name, functions that make each anew."""

from __future__ import annotations

import abc
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import io
import math
import pathlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import replicator


class Hostile(Exception):
    """Raised by deliberately obstructive objects; counts as the user's own error."""


def _raise(*args: Any, **kwargs: Any) -> Any:
    raise Hostile("of the user")


def _hostile(*methods: str) -> Any:
    """Returns an object whose methods raise."""
    return type("Odd", (), dict.fromkeys(methods, _raise))()


class _Index:
    def __index__(self) -> int:
        return 1


class _Str(str):
    __slots__ = ()


class _Int(int):
    pass


class _Color(enum.Enum):
    RED = 1


class _Number(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass
class _Point:
    x: int = 1


class _Abstract(abc.ABC):
    @abc.abstractmethod
    def f(self) -> None: ...


class _Callable:
    def __call__(self) -> float:
        return 1.0


class _Lying:
    """Claims to be an array, and is none."""

    shape, dtype, ndim = "round", "float33", -1

    def __len__(self) -> int:
        return -1


_Pair = collections.namedtuple("_Pair", "a b")


async def _coroutine_function() -> None:
    pass


def _generator_function() -> Any:
    yield 1


def _deep(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def _circle() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def _foreign() -> tf.Tensor:
    with tf.Graph().as_default():
        return tf.constant(1.0)


def _operation() -> tf.Operation:
    with tf.Graph().as_default():
        return tf.no_op()


def _closed() -> io.StringIO:
    file = io.StringIO()
    file.close()
    return file


def _other() -> replicator.Replicator:
    return replicator.Replicator(["CPU:2", "CPU:3", "CPU:4"])


_MEMORY = _Point()  # keeps the weak reference alive

_PLAIN: dict[str, Callable[[], Any]] = {
    repr(value): functools.partial(lambda v: v, value)
    for value in [
        *(None, True, False, ..., NotImplemented, 0, 1, -1, 2, 7, -7, 2**31, -(2**31)),
        *(2**32, 2**63, -(2**63), 2**64, 0.0, 0.5, 1.5, -1.0, math.nan, math.inf),
        *(-math.inf, 1e400, 1e-320, 1j, "", " ", "text", "sum", "mean", "max", "CPU"),
        *("CPU:0", "cpu:1", "CPU:-1", "CPU:x", "CPU:1000000", "GPU:0", "GPU:99"),
        *("/job:worker/task:7/device:CPU:0", "/device:CPU:0/device:CPU:1", "*", "/"),
        *("CPU:*", "\0", "a\nb", "\udc80", "\N{SNOWMAN}", "%s %d {0}", "None", "1"),
        *(b"", b"bytes", b"\xff\xfe", (), [], {}, set(), frozenset({1}), [[]], [()]),
        *([None], [0], [0, 0], [0, 1], [1, 0], [[0], [1]], [[0, 1]], [[0], [0]]),
        *([[1], [0]], [-1], [2], [0, 99], [0, None], ["CPU:0"], ["CPU:0", "CPU:0"]),
        *(["CPU:0", "CPU:1000000"], ["CPU:0", None], [["CPU:0", "CPU:1"], "CPU:2"]),
        *([["CPU:0"], []], ["CPU:0", ["CPU:1", ["CPU:2"]]], ["CPU:99999999999999"]),
        *([0.5], [True, False], [1, "a"], [[1.0], [1.0, 2.0]], [1.0, None], (0, 1)),
        *((1, 0), [(0, 1), (1, 0)], [(0, 1), (0, 1)], [(0, 5)], [(0,)], [(0, 1, 2)]),
        *({"a": 1}, {1: 2, "b": 3}, {"a": None}, {None: None}, {"a": {"b": [1]}}),
        *(range(0), range(2), range(100), slice(1), int, type, object, Exception),
    ]
}

_MADE: dict[str, Callable[[], Any]] = {
    # Numbers, texts and containers
    "10**400": lambda: 10**400,
    "-10**400": lambda: -(10**400),
    "10**5000": lambda: 10**5000,
    "long text": lambda: "x" * 1_000_000,
    "long list": lambda: list(range(50)),
    "deep list": lambda: _deep(20_000),
    "nested list": lambda: _deep(90),
    "circle": _circle,
    "generator": lambda: (k for k in range(2)),
    "iterator": lambda: iter([0, 1]),
    "map": lambda: map(str, [1]),
    "zip": lambda: zip([1], [2], strict=True),
    "dict keys": lambda: {"a": 1}.keys(),
    "namedtuple": lambda: _Pair(1, 2),
    "ordered dict": lambda: collections.OrderedDict(b=1.0, a=2.0),
    "defaultdict": lambda: collections.defaultdict(list),
    "deque": lambda: collections.deque([1]),
    "bytearray": lambda: bytearray(b"ab"),
    "memoryview": lambda: memoryview(b"ab"),
    "Fraction": lambda: fractions.Fraction(1, 2),
    "Decimal": lambda: decimal.Decimal("1.5"),
    "datetime": lambda: datetime.datetime(2020, 1, 1),
    "enum": lambda: _Color.RED,
    "int enum": lambda: _Number.ONE,
    "str subclass": lambda: _Str("sum"),
    "int subclass": lambda: _Int(1),
    "index": _Index,
    "dataclass": _Point,
    # Objects in the way
    "object": object,
    "repr raises": lambda: _hostile("__repr__"),
    "str raises": lambda: _hostile("__str__", "__repr__", "__format__"),
    "eq raises": lambda: _hostile("__eq__", "__ne__"),
    "hash raises": lambda: _hostile("__hash__"),
    "len raises": lambda: _hostile("__len__"),
    "bool raises": lambda: _hostile("__bool__"),
    "iter raises": lambda: _hostile("__iter__"),
    "next raises": lambda: _hostile("__iter__", "__next__"),
    "getitem raises": lambda: _hostile("__getitem__"),
    "array raises": lambda: _hostile("__array__"),
    "float raises": lambda: _hostile("__float__", "__int__", "__index__"),
    "fspath raises": lambda: _hostile("__fspath__"),
    "getattr raises": lambda: _hostile("__getattr__"),
    "reduce raises": lambda: _hostile("__reduce__", "__reduce_ex__"),
    "all raises": lambda: _hostile(
        *("__repr__", "__eq__", "__hash__", "__len__", "__bool__", "__iter__"),
        *("__getitem__", "__array__", "__getattr__", "__call__", "__float__"),
    ),
    "lying": _Lying,
    # Functions
    "no argument": lambda: lambda: 1.0,
    "one argument": lambda: lambda x: x,
    "two arguments": lambda: lambda a, b: a,
    "keyword only": lambda: lambda *, k: k,
    "any arguments": lambda: lambda *a, **k: 1.0,
    "function raises": lambda: _raise,
    "builtin len": lambda: len,
    "builtin print": lambda: print,
    "builtin max": lambda: max,
    "partial": lambda: functools.partial(lambda a, b: a, 1),
    "callable": _Callable,
    "unhashable partial": lambda: functools.partial(lambda a: 1.0, []),
    "coroutine function": lambda: _coroutine_function,
    "generator function": lambda: _generator_function,
    "abstract class": lambda: _Abstract,
    "bound method": lambda: [1.0].pop,
    "module": lambda: math,
    "property": lambda: property(_raise),
    "exception": lambda: ValueError("x"),
    # Things of the system
    "closed file": _closed,
    "text file": io.StringIO,
    "byte file": io.BytesIO,
    "path": lambda: pathlib.Path("/nonexistent/file"),
    "folder": lambda: "/",
    "device file": lambda: "/dev/null",
    "lock": threading.Lock,
    "weakref": lambda: weakref.ref(_MEMORY),
    # NumPy
    "np.float64": lambda: np.float64(1.5),
    "np.int64": lambda: np.int64(1),
    "np.uint8": lambda: np.uint8(1),
    "np.bool": lambda: np.bool_(True),
    "np.nan": lambda: np.float32(np.nan),
    "np.str": lambda: np.str_("sum"),
    "np.longdouble": lambda: np.longdouble(1),
    "np.datetime64": lambda: np.datetime64("2020-01-01"),
    "np.void": lambda: np.zeros(1, [("a", "f4")])[0],
    "0-d array": lambda: np.array(1.0),
    "9-d array": lambda: np.zeros([1] * 9, np.float32),
    "40-d array": lambda: np.zeros([1] * 40, np.float32),
    "empty array": lambda: np.zeros([0, 3], np.float32),
    "int array": lambda: np.array([0, 1]),
    "uint64 array": lambda: np.array([0, 1], np.uint64),
    "float array": lambda: np.array([0.5, 1.5]),
    "nan array": lambda: np.array([math.nan, math.inf]),
    "bool array": lambda: np.array([True, False]),
    "text array": lambda: np.array(["a", "b"]),
    "object array": lambda: np.array([None, {}], object),
    "number object array": lambda: np.array([1.0, 2.0], object),
    "struct array": lambda: np.zeros(2, [("a", "f4"), ("b", "i4")]),
    "date array": lambda: np.array(["2020-01-01"], "datetime64[D]"),
    "masked array": lambda: np.ma.masked_array([1.0, 2.0], [True, False]),
    "strided array": lambda: np.arange(8.0)[::2],
    "big endian": lambda: np.arange(2, dtype=">f4"),
    "matrix": lambda: np.ones([2, 3], np.float32),
    # TensorFlow
    "float tensor": lambda: tf.constant([1.0, 2.0]),
    "scalar tensor": lambda: tf.constant(1.0),
    "int tensor": lambda: tf.constant([0, 1]),
    "int scalar tensor": lambda: tf.constant(1),
    "uint8 tensor": lambda: tf.constant([1, 2], tf.uint8),
    "uint64 tensor": lambda: tf.constant([1, 2], tf.uint64),
    "bool tensor": lambda: tf.constant([True, False]),
    "bool scalar tensor": lambda: tf.constant(True),
    "text tensor": lambda: tf.constant(["a", "b"]),
    "text scalar tensor": lambda: tf.constant("sum"),
    "complex tensor": lambda: tf.constant([1j]),
    "half tensor": lambda: tf.constant([1.0], tf.float16),
    "bfloat16 tensor": lambda: tf.constant([1.0], tf.bfloat16),
    "qint tensor": lambda: tf.quantization.quantize([1.0], 0.0, 2.0, tf.qint8).output,
    "float8 tensor": lambda: tf.cast(
        tf.constant([1.0]), tf.dtypes.experimental.float8_e5m2
    ),
    "int4 tensor": lambda: tf.cast(tf.constant([1]), tf.dtypes.experimental.int4),
    "empty tensor": lambda: tf.zeros([0]),
    "8-d tensor": lambda: tf.zeros([1] * 8),
    "unknown shape": lambda: tf.compat.v1.placeholder_with_default([1.0, 2.0], None),
    "unknown size": lambda: tf.compat.v1.placeholder_with_default([1.0, 2.0], [None]),
    "random tensor": lambda: tf.random.uniform([2]),
    "ragged": lambda: tf.ragged.constant([[1.0], [2.0, 3.0]]),
    "sparse": lambda: tf.sparse.from_dense([[0.0, 1.0]]),
    "slices": lambda: tf.IndexedSlices(
        tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2])
    ),
    "slices of int": lambda: tf.IndexedSlices(
        tf.ones([1, 2], tf.int32), tf.constant([0]), tf.constant([3, 2])
    ),
    "slices without shape": lambda: tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0])),
    "slices of slices": lambda: tf.IndexedSlices("a", "b"),
    "variable": lambda: tf.Variable([1.0, 2.0]),
    "int variable": lambda: tf.Variable(1),
    "text variable": lambda: tf.Variable("text"),
    "variable handle": lambda: tf.Variable(1.0).handle,
    "variant": lambda: tf.raw_ops.EmptyTensorList(
        element_shape=-1, max_num_elements=2, element_dtype=tf.float32
    ),
    "TensorArray": lambda: tf.TensorArray(tf.float32, 2),
    "table": lambda: tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(["a"], [1]), 0
    ),
    "dtype": lambda: tf.float32,
    "TensorShape": lambda: tf.TensorShape([2]),
    "unknown TensorShape": lambda: tf.TensorShape(None),
    "TensorSpec": lambda: tf.TensorSpec([2], tf.float32),
    "unknown TensorSpec": lambda: tf.TensorSpec(None, tf.float32),
    "text TensorSpec": lambda: tf.TensorSpec([2], tf.string),
    "RaggedTensorSpec": lambda: tf.RaggedTensorSpec([None, None]),
    "huge TensorSpec": lambda: tf.TensorSpec([2**40, 2**40], tf.float32),
    "DeviceSpec": lambda: tf.DeviceSpec.from_string("/CPU:0"),
    "logical devices": tf.config.list_logical_devices,
    "physical devices": lambda: tf.config.list_physical_devices("CPU"),
    "dataset": lambda: tf.data.Dataset.range(4),
    "infinite dataset": lambda: tf.data.Dataset.from_tensors(1.0).repeat(),
    "empty dataset": lambda: tf.data.Dataset.range(0),
    "dataset of datasets": lambda: tf.data.Dataset.range(4).window(2),
    "ragged dataset": lambda: tf.data.Dataset.from_tensors(
        tf.ragged.constant([[1.0], []])
    ),
    "failing dataset": lambda: tf.data.Dataset.range(4).map(
        lambda k: tf.debugging.check_numerics(0.0 / tf.cast(k, tf.float32), "nan")
    ),
    "optional": lambda: tf.experimental.Optional.from_value(1.0),
    "graph": tf.Graph,
    "operation": _operation,
    "tensor of another graph": _foreign,
    "tf.function": lambda: tf.function(lambda: 1.0),
    "tf.function of one": lambda: tf.function(lambda x: x),
    "module of tf": tf.Module,
    "tape": tf.GradientTape,
    "KerasTensor": lambda: tf.keras.Input([2]),
    "Keras layer": lambda: tf.keras.layers.Dense(1),
    "Keras optimizer": lambda: tf.keras.optimizers.SGD(0.1),
    "Keras optimizer with variables": lambda: _built_optimizer(),
    "v1 optimizer": lambda: tf.compat.v1.train.GradientDescentOptimizer(0.1),
    "Keras metric": tf.keras.metrics.Mean,
    "Keras variable": lambda: tf.keras.Variable(1.0),
    "session": lambda: tf.compat.v1.Session(graph=tf.Graph()),
    "strategy": tf.distribute.get_strategy,
    # Of this library
    "PerReplica": lambda: replicator.PerReplica(1.0, 2.0),
    "InputContext": lambda: replicator.InputContext(0, 2, 0, 2),
    "Replicator": _other,
    "Replicator class": lambda: replicator.Replicator,
    "another's group": lambda: _other().group([0, 2]),
    "another's partition": lambda: _other().groups([[0], [1, 2]]),
    "another's run": lambda: _other().run,
    "another's all_reduce": lambda: _other().all_reduce,
    "another's step": lambda: _other().build(lambda: 1.0),
    "context": lambda: _other().context(),
}


def _built_optimizer() -> Any:
    optimizer = tf.keras.optimizers.Adam(0.1)
    optimizer.build([tf.Variable(1.0)])
    return optimizer


VALUES = {**_PLAIN, **_MADE}
