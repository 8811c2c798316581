# SPDX-License-Identifier: Apache-2.0
"""The batches and variables of random programs."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

NAMES = ("x", "y", "i", "t", "lengths", "z", "c")
KINDS = ("float64",) * 7 + ("float32",) * 2 + ("mixed",)
# A step of 2 replicas is even, uneven or, with 1 example, has an empty shard; one of
# 3 replicas has an empty shard with 1 or 2, whose rounds of division are uneven, too.
SIZES = (1, 2, 3, 4, 5, 6, 7)


def kind(seed: int) -> str:
    """Returns the dtypes of a program."""
    return str(np.random.default_rng([seed, 1]).choice(KINDS))


def dtype(seed: int) -> tf.DType:
    return tf.float64 if kind(seed) == "float64" else tf.float32


def integers(seed: int) -> tf.DType:
    return tf.int64 if seed % 3 == 0 else tf.int32


def is_long(seed: int) -> bool:
    """Whether the length of the sequences in t is unknown."""
    return seed % 2 == 1


def signature(seed: int) -> list[tf.TensorSpec]:
    """Returns what a program takes, in the order of NAMES."""
    real, whole, times = dtype(seed), integers(seed), None if is_long(seed) else 4
    return [
        tf.TensorSpec([None, 3], real),
        tf.TensorSpec([None], real),
        tf.TensorSpec([None], whole),
        tf.TensorSpec([None, times, 3], real),
        tf.TensorSpec([None], tf.int32),
        tf.TensorSpec([None, 3], real),
        tf.TensorSpec([3], real),
    ]


def batches(seed: int) -> list[list[np.ndarray]]:
    """Returns the arguments of two steps; the second has few examples."""
    rng = np.random.default_rng([seed, 2])
    result = []
    for sizes in (SIZES[3:], SIZES):
        n, k = int(rng.choice(sizes)), int(rng.choice(SIZES))
        times = int(rng.integers(2, 6)) if is_long(seed) else 4
        signs = (-1) ** np.arange(n) if rng.random() < 0.7 else np.ones(n)
        arrays = [
            rng.normal(size=[n, 3]),
            (np.abs(rng.normal(size=n)) + 0.1) * signs,
            rng.integers(0, 7, n),
            rng.normal(size=[n, times, 3]),
            rng.integers(1, times + 1, n),
            rng.normal(size=[k, 3]),
            rng.normal(size=3),
        ]
        specs = signature(seed)
        result.append(
            [
                a.astype(s.dtype.as_numpy_dtype)
                for a, s in zip(arrays, specs, strict=False)
            ]
        )
    return result


def initial(seed: int) -> dict[str, np.ndarray]:
    """Returns the initial values of the variables: weights first, then what is kept."""
    rng, real = np.random.default_rng(99), dtype(seed).as_numpy_dtype
    weights = {"w": [3, 4], "u": [4, 3], "b": [4], "table": [7, 3], "scale": [3]}
    kept = {"average": [3], "bank": [4, 3], "seen": [7], "vector": [4], "total": []}
    values = {k: rng.normal(0, 0.5, s).astype(real) for k, s in weights.items()}
    values |= {k: rng.normal(0, 0.5, s).astype(real) for k, s in kept.items()}
    values |= {f"{k}/slot": np.zeros(s, real) for k, s in weights.items()}
    values["count"] = np.array(2**53 + 1, np.int64)
    values["step"] = np.array(0, np.int32)
    values["is_on"] = np.array(True)
    return values


WEIGHTS = ("w", "u", "b", "table", "scale")


def variables(seed: int) -> dict[str, tf.Variable]:
    """Makes the variables of a program."""
    return {
        name: tf.Variable(
            value,
            name=name.replace("/", "_"),
            trainable=name in WEIGHTS,
        )
        for name, value in initial(seed).items()
    }


def values_given(seed: int, given: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns the dimensions of the arguments that are values."""
    times = "T" if is_long(seed) else 4
    dims = {"x": ("n", 3), "y": ("n",), "t": ("n", times, 3), "z": ("k", 3), "c": (3,)}
    return [(name, (given[name], d)) for name, d in dims.items()]
