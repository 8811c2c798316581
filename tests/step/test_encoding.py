# SPDX-License-Identifier: Apache-2.0
"""Values for other processes are decoded as they were, and run nothing there."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import pathlib
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from replicator.step import encoding

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 10**100, 0.1, -0.0, float("inf"), 1 + 2j),
    *("", "é\ud800\0", b"", b"\0\xff", [], (), {}, set(), frozenset()),
    [1, [2.0, ("a",)], {"k": [None]}],
    ["list", [1]],  # as lists are encoded
    (1, (2, 3)),
    {(1, None): {"a": b"b"}, frozenset({1}): {2, 3}, True: 0},
    *(np.float32(2), np.int64(-1), np.bool_(True), np.str_("ab"), np.bytes_(b"ab")),
    *(np.datetime64("2020-01-01"), np.complex64(1j), ml_dtypes.bfloat16(3)),
    *(np.zeros([]), np.zeros([0, 3], np.int8), np.arange(6.0).reshape(2, 3).T),
    *(np.array(["a", "bcd"]), np.array([b"a\0b"]), np.array([1], ">i4")),
    *(np.array([1.5], ml_dtypes.bfloat16), np.array([np.nan], np.float16)),
]


def _alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return _alike([*one.items()], [*other.items()])
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return repr(one) == repr(other) if isinstance(one, float) else one == other


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_are_decoded_as_they_were(value: Any) -> None:
    for nested in (value, [value, (value,)], {"key": value}):
        assert _alike(encoding.decode(encoding.encode(nested)), nested)


def test_each_decoded_array_can_be_changed() -> None:
    data = encoding.encode(np.zeros(2))
    one, other = encoding.decode(data), encoding.decode(data)
    one += 1.0
    assert other.tolist() == [0.0, 0.0]


class _Number(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass
class _Facts:
    size: int


_Pair = collections.namedtuple("_Pair", "a b")
_circle: list[Any] = []
_circle.append(_circle)
REFUSED = {
    "_Facts": _Facts(1),
    "_Number": _Number.ONE,
    "_Pair": _Pair(1, 2),
    "OrderedDict": collections.OrderedDict(a=1),
    "PosixPath": pathlib.PosixPath("/"),
    "function": lambda: 0,
    "type": int,
    "NumPy array of object": np.array([None]),
    "NumPy array of void32": np.zeros(2, [("a", "i4")]),
    "value that holds itself": _circle,
    "number of thousands of digits": 10**5000,
}


@pytest.mark.parametrize("name", REFUSED)
def test_all_else_is_refused(name: str) -> None:
    for nested in (REFUSED[name], {"a": [REFUSED[name]]}):
        with pytest.raises(encoding.CannotEncode, match=f"^{name}$"):
            encoding.encode(nested)


class _Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (self._path,)


def test_what_others_send_runs_nothing(tmp_path: pathlib.Path) -> None:
    trap = pickle.dumps(_Trap(tmp_path / "ran"))
    texts = (
        ["os.system", "x"],
        ["array", "O", [1], "AAAAAAAA"],
        ["array"],
        ["bytes"],
        [{}],
        [[]],
    )
    for data in (trap, *(json.dumps(text).encode() for text in texts)):
        with pytest.raises(ValueError):
            encoding.decode(data)
    assert not (tmp_path / "ran").exists()
    pickle.loads(trap)  # what would have run
    assert (tmp_path / "ran").exists()
