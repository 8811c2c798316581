# SPDX-License-Identifier: Apache-2.0
"""How a random program trains its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.forms.programs.inputs import WEIGHTS

RATE = 0.1
Update = Callable[[dict[str, tf.Variable], list[tuple[str, Any]]], None]


def _slopes(pairs: list[tuple[str, Any]]) -> list[tuple[str, tf.Tensor]]:
    return [(name, tf.convert_to_tensor(slope)) for name, slope in pairs]


def descent(variables: dict[str, tf.Variable], pairs: list[tuple[str, Any]]) -> None:
    for name, slope in _slopes(pairs):
        variables[name].assign_sub(RATE * slope)


def sparse(variables: dict[str, tf.Variable], pairs: list[tuple[str, Any]]) -> None:
    for name, slope in pairs:
        if isinstance(slope, tf.IndexedSlices):
            variables[name].scatter_sub(
                tf.IndexedSlices(RATE * slope.values, slope.indices)
            )
        else:
            variables[name].assign_sub(RATE * slope)


def clipped(variables: dict[str, tf.Variable], pairs: list[tuple[str, Any]]) -> None:
    names, slopes = zip(*pairs, strict=True)
    slopes, _ = tf.clip_by_global_norm(slopes, 0.5)
    sparse(variables, list(zip(names, slopes, strict=True)))


def momentum(variables: dict[str, tf.Variable], pairs: list[tuple[str, Any]]) -> None:
    for name, slope in _slopes(pairs):
        slot = variables[f"{name}/slot"]
        slot.assign(0.9 * slot + slope)
        variables[name].assign_sub(RATE * slot)


def adaptive(variables: dict[str, tf.Variable], pairs: list[tuple[str, Any]]) -> None:
    for name, slope in _slopes(pairs):
        slot = variables[f"{name}/slot"]
        slot.assign_add(slope**2)
        variables[name].assign_sub(RATE * slope / (tf.sqrt(slot) + 0.5))


def normalized(variables: dict[str, tf.Variable], pairs: list[tuple[str, Any]]) -> None:
    """As LARS: by each variable's norms; with decay."""
    for name, slope in _slopes(pairs):
        v = variables[name]
        slope += 0.01 * v
        ratio = tf.norm(v) / (tf.sqrt(tf.reduce_sum(slope**2)) + 1.0)
        v.assign_sub(RATE * ratio * slope)


def accumulated(
    variables: dict[str, tf.Variable], pairs: list[tuple[str, Any]]
) -> None:
    """Applies what it added up in each second step."""
    step = variables["step"]
    for name, slope in _slopes(pairs):
        variables[f"{name}/slot"].assign_add(slope)
    step.assign_add(1)

    def apply() -> tf.Tensor:
        for name, _ in pairs:
            slot = variables[f"{name}/slot"]
            variables[name].assign_sub(RATE * slot)
            slot.assign(tf.zeros_like(slot))
        return tf.constant(True)

    tf.cond(tf.equal(step % 2, 0), apply, lambda: tf.constant(False))


def unless_infinite(
    variables: dict[str, tf.Variable], pairs: list[tuple[str, Any]]
) -> None:
    """Skips a step whose gradients are not finite or large, as loss scaling does."""
    slopes = _slopes(pairs)
    norm = tf.sqrt(tf.add_n([tf.reduce_sum(slope**2) for _, slope in slopes]))
    is_fine = tf.reduce_all(
        [tf.reduce_all(tf.math.is_finite(slope)) for _, slope in slopes]
    )

    def apply() -> tf.Tensor:
        descent(variables, slopes)
        return tf.constant(True)

    tf.cond(tf.logical_and(is_fine, norm < 5.0131), apply, lambda: tf.constant(False))


def raw(variables: dict[str, tf.Variable], pairs: list[tuple[str, Any]]) -> None:
    """By ops that update variables in place, as those of TensorFlow 1 do."""
    ops = tf.raw_ops
    for name, slope in pairs:
        v, slot = variables[name], variables[f"{name}/slot"]
        rate, rho = tf.cast(RATE, v.dtype), tf.cast(0.9, v.dtype)
        own = {"var": v.handle, "accum": slot.handle, "lr": rate, "momentum": rho}
        if isinstance(slope, tf.IndexedSlices):
            dense = tf.math.unsorted_segment_sum(
                slope.values, slope.indices, v.shape[0]
            )
            ops.ResourceApplyMomentum(
                **own, grad=dense, use_locking=False, use_nesterov=False
            )
        elif name == "b":
            ops.ResourceApplyGradientDescent(var=v.handle, alpha=rate, delta=slope)
        else:
            ops.ResourceApplyMomentum(
                **own, grad=slope, use_locking=False, use_nesterov=True
            )


UPDATES: tuple[Update, ...] = (
    *(descent, descent, sparse, clipped, momentum, adaptive, normalized),
    *(accumulated, unless_infinite, raw),
)


def train(
    seed: int, tape: tf.GradientTape, loss: Any, variables: dict[str, Any]
) -> Any:
    """Takes a step; returns the norms of the gradients."""
    rng = np.random.default_rng([seed, 3])
    own = [variables[name] for name in WEIGHTS]
    slopes = tape.gradient(loss, own)
    pairs = [(n, s) for n, s in zip(WEIGHTS, slopes, strict=True) if s is not None]
    if not pairs:
        return []
    UPDATES[int(rng.integers(len(UPDATES)))](variables, pairs)
    return [tf.reduce_sum(tf.convert_to_tensor(slope) ** 2) for _, slope in pairs]
