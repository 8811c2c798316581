# SPDX-License-Identifier: Apache-2.0
"""What a random program draws its next computation from.

A value is a tensor with a name or a number per dimension. What is drawn in a step
depends on the seed and the step only, and which value is picked changes little when
others are left out: so a program that fails is made small by leaving out its steps.

One device and replicas round differently. What is not continuous in its input - a
comparison, a sort, an argmax - takes it from `decisive`, rounded to a grid on which the
two agree.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Dims = tuple[int | str, ...]
Made = tuple[tf.Tensor, Sequence[int | str]]
Fits = Callable[[Dims], bool]
Maker = Callable[["Builder"], "Made | None"]


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor of the program's dtype.

    Attributes:
        tensor: The tensor.
        dims: Per dimension, its size or a name: equal names are equal sizes.
        step: In which step it was made; negative: it is an input.
        maker: What made it.
    """

    tensor: tf.Tensor
    dims: Dims
    step: int
    maker: str


class Builder:
    """The state of a program while it is traced.

    Attributes:
        seed: Of the program.
        dtype: Of its values.
        is_exact: Whether rounding is so small that any value may be decisive.
        is_mixed: Whether some computations are in float16.
        given: The arguments: x, y, i, t, lengths, z, c (see inputs.py).
        variables: By name.
        values: What may be picked.
    """

    def __init__(
        self, seed: int, kind: str, given: dict[str, Any], variables: dict[str, Any]
    ) -> None:
        self.seed, self.given, self.variables = seed, given, variables
        self.dtype = tf.float64 if kind == "float64" else tf.float32
        self.is_exact, self.is_mixed = kind == "float64", kind == "mixed"
        self.values: list[Value] = []
        self.rng = np.random.default_rng(seed)
        self._step, self._draws = -1, 0
        self.n = tf.shape(given["x"])[0]

    def begin(self, step: int) -> None:
        """Begins a step: what it draws follows from its number."""
        self._step, self._draws = step, 0
        self.rng = np.random.default_rng([self.seed, step + 100])

    def add(self, made: Made | None, maker: str) -> None:
        """Keeps what a step made, unless it is too large or certainly empty."""
        if made is None:
            return
        tensor, dims = made
        names = [d for d in dims if isinstance(d, str)]
        if len(dims) < 5 and 0 not in dims and len(names) < 3:
            assert tensor.dtype == self.dtype, (maker, tensor)
            assert tensor.shape.rank in (None, len(dims)), (maker, tensor, dims)
            self.values.append(Value(tensor, tuple(dims), self._step, maker))

    # Drawing.

    def of(self, options: Sequence[Any]) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def chance(self, share: float = 0.5) -> bool:
        return bool(self.rng.random() < share)

    def find(self, fits: Fits | None = None, only_inputs: bool = False) -> Value | None:
        """Returns a value whose dimensions fit, rather a recent one."""
        self._draws += 1
        place = f"{self.seed}.{self._step}.{self._draws}."

        def rank(value: Value) -> float:
            age = 6 if value.step < 0 else self._step - value.step
            return random.Random(place + f"{value.step}").random() ** (1 + age / 2)

        found = [
            v
            for v in self.values
            if (fits is None or fits(v.dims)) and not (only_inputs and v.step >= 0)
        ]
        return max(found, key=rank, default=None)

    def pick(self, fits: Fits | None = None) -> tuple[tf.Tensor, Dims]:
        """Returns such a value's tensor and dimensions; without one, those of x."""
        value = self.find(fits)
        if value is None:
            return self.given["x"], ("n", 3)
        return value.tensor, value.dims

    def axis_of(self, least: int = 1) -> tuple[tf.Tensor, Dims, int]:
        """Returns a value of at least so many dimensions, and one of these."""
        a, dims = self.pick(lambda dims: len(dims) >= least)
        return a, dims, int(self.rng.integers(len(dims)))

    def decisive(self, fits: Fits | None = None) -> tuple[tf.Tensor, Dims]:
        """Returns a value whose order does not depend on rounding."""
        value = self.find(fits, only_inputs=not self.is_exact)
        if value is None:
            return rounded(self.given["x"]), ("n", 3)
        return rounded(value.tensor), value.dims

    def decisive_axis(self, least: int = 1) -> tuple[tf.Tensor, Dims, int]:
        a, dims = self.decisive(lambda dims: len(dims) >= least)
        return a, dims, int(self.rng.integers(len(dims)))

    def mask(self) -> tf.Tensor:
        """Returns a truth value per example; perhaps all false on some replica."""
        (x, y), (i, lengths) = (self.given[k] for k in "xy"), self._integers()
        options = [
            lambda: y > 0,
            lambda: tf.equal(i % 3, 1),
            lambda: tf.range(self.n) < 2,
            lambda: tf.range(self.n) >= self.n - 1,
            lambda: lengths > 2,
            lambda: x[:, 0] > rounded(tf.reduce_mean(x[:, 0])) + 0.331e-6,
        ]
        return self.of(options)()

    def _integers(self) -> tuple[tf.Tensor, tf.Tensor]:
        return self.given["i"], self.given["lengths"]

    def number(self, value: Any) -> tf.Tensor:
        return tf.cast(value, self.dtype)


@tf.custom_gradient
def rounded(a: tf.Tensor) -> Any:
    """Rounds to a grid; the gradient is that of the identity."""
    return tf.round(a * 1e6) / 1e6, lambda d: d


def calm(a: tf.Tensor) -> tf.Tensor:
    """Keeps values from growing."""
    return 2 * tf.tanh(a / 2)


def finite(a: tf.Tensor) -> tf.Tensor:
    """Puts zeros in place of what a reduction of nothing makes."""
    return tf.where(tf.math.is_finite(a), a, tf.zeros_like(a))


def without(dims: Sequence[Any], k: int, *made: Any) -> list[Any]:
    """Returns dimensions with others in place of one."""
    return [*dims[:k], *made, *dims[k + 1 :]]


def has_rows(dims: Dims) -> bool:
    return dims[:1] == ("n",)


def is_matrix(dims: Dims) -> bool:
    return len(dims) == 2 and dims[0] == "n" and isinstance(dims[1], int)
