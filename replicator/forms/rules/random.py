# SPDX-License-Identifier: Apache-2.0
"""Rules of random numbers.

Of ops with state (tf.random.normal), each replica draws its own part of something that
is sharded: numbers of the same law as on one device, but not the same ones. The library
gives each replica's ops seeds of their own (graph/passes/random.py). What is of
replicated shape is drawn once, on replica 0, for all.

Stateless ops (tf.random.stateless_uniform, the dropout of Keras) are functions of
their seed, and give exactly the numbers of one device. Philox, TensorFlow's generator,
computes the n-th number from n, so each replica begins at its own rows (Salmon et al.
2011, Parallel random numbers: as easy as 1, 2, 3). Other stateless ops have no rule:
the replicas draw the whole, and take their parts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator.forms.forms import Fact, Sharded
from replicator.forms.rule import LOCAL, OpPlan, plan, rule
from replicator.forms.rules.shapes import fill, of_sizes
from replicator.forms.sizes import elements

rule("RandomStandardNormal RandomUniform RandomUniformInt TruncatedNormal")(fill)


@rule(
    "StatelessRandomUniformV2 StatelessRandomNormalV2 StatelessRandomUniformIntV2 "
    "StatelessRandomUniformFullIntV2"
)
def stateless(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """Numbers of a shape, a key and a counter: those of the rows that a replica has."""
    made = of_sizes(elements(op.inputs[0], facts[0]))
    if made is None or made.axis != 0 or made.outer != 1:
        return None
    return plan(op, [LOCAL], made, build=functools.partial(_of_own_rows, made=made))


def _of_own_rows(
    replica: Any, op: tf.Operation, inputs: Sequence[Any], made: Sharded
) -> list[tf.Tensor]:
    """Draws the numbers of this replica's rows, which follow each other."""
    shape, key, counter, *rest = inputs
    together = 2 if op.outputs[0].dtype.size == 8 else 4  # that one counter makes
    own = tf.cast(shape, tf.int64)
    per_row = tf.reduce_prod(own[1:]) * (made.inner or 1)
    first = tf.cast(replica.offset(made.layout), tf.int64) * per_row
    before = first % together  # numbers of the same counter, but of another replica
    count = tf.reshape(before + tf.reduce_prod(own), [1])
    counter = _advanced(counter, first // together)
    (drawn,) = replica.stamp(op, [count, key, counter, *rest], Tshape=tf.int64)
    return [tf.reshape(drawn[before:], shape)]


def _advanced(counter: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
    """Returns a counter of 128 bits, the low ones first, after so many steps."""
    low, high = tf.unstack(tf.bitcast(counter, tf.int64))
    after = low + steps
    is_over = (low < 0) & (after >= 0)  # as numbers without a sign
    return tf.bitcast(tf.stack([after, high + tf.cast(is_over, tf.int64)]), tf.uint64)
