# SPDX-License-Identifier: Apache-2.0
"""Compares functions of whole batches on replicas with plain TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from replicator.forms import engine


def devices(count: int) -> list[str]:
    """Returns the devices of so many replicas."""
    return [f"cpu:{k}" for k in range(count)]


def batch(specs: Sequence[tf.TensorSpec], rows: int) -> list[np.ndarray]:
    """Returns random arguments whose unknown sizes are a number of rows."""
    rng = np.random.default_rng(rows)
    arrays = []
    for spec in specs:
        shape = [rows if size is None else size for size in spec.shape.as_list()]
        floats = rng.normal(size=shape)
        is_int = spec.dtype.is_integer
        made = rng.integers(0, 5, shape) if is_int else floats
        arrays.append(made.astype(spec.dtype.as_numpy_dtype))
    return arrays


def run(
    make: Callable[[], Any],
    specs: Sequence[tf.TensorSpec],
    rows: Sequence[int] = (7, 4, 1),
    replicas: int = 2,
    empty: bool = False,
    **options: Any,
) -> tuple[engine.WholeBatchFunction, replicator.Replicator]:
    """States that replicas return, and write, what one device does.

    Args:
        make: Makes a function and returns it with its variables.
        specs: Of the function's arguments.
        rows: The numbers of rows of the batches, one step each.
        replicas: The number of replicas.
        empty: Whether replicas may have no rows.
        **options: Of the Replicator.

    Returns:
        The function of whole batches, and the Replicator.
    """
    function, variables = make()
    plain = tf.function(function, input_signature=specs)
    repl = replicator.Replicator(devices(replicas), **options)
    with repl.context():
        function, replicated = make()
    on_replicas = engine.WholeBatchFunction(function, repl, specs, empty=empty)
    for n in rows:
        arrays = batch(specs, n)
        want, have = plain(*arrays), on_replicas(*arrays)
        tf.nest.map_structure(_check, want, have, expand_composites=True)
        for one, other in zip(variables, replicated, strict=True):
            _check(one.numpy(), other.numpy())
    return on_replicas, repl


def _check(want: Any, have: Any) -> None:
    want, have = np.asarray(want), np.asarray(have)
    if want.dtype.kind in "fc":
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-6)
    else:
        np.testing.assert_array_equal(have, want)


def primitives(repl: replicator.Replicator) -> list[str]:
    """Returns the primitives that the steps built last call, sorted."""
    return sorted(row.primitive for row in repl.plan)
