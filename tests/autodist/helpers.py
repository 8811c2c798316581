# SPDX-License-Identifier: Apache-2.0
"""Runs single-device programs: on one device with plain TensorFlow, and on many."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from replicator.autodist import marked, owned, stamping
from replicator.autodist.kinds import Kind, Value
from replicator.autodist.program import Program
from replicator.autodist.values import Values
from tests.autodist import programs

v1 = tf.compat.v1


def make(num_replicas: int, strategy: Any = None, **options: Any) -> Any:
    """Returns an AutoDist on the first `num_replicas` logical CPUs."""
    devices = [f"CPU:{r}" for r in range(num_replicas)]
    return replicator.AutoDist(devices, strategy, **options)


def run(
    program: Callable[[int], programs.Built],
    num_replicas: int | None,
    strategy: Any = None,
    sizes: Sequence[int] = programs.SIZES,
    batch: int = 12,
) -> Any:
    """Returns the fetches of all steps, and the final variables.

    Args:
        program: Builds the program, given the batch size of its iterator.
        num_replicas: The number of replicas; None: plain TensorFlow on one device.
        strategy: As for AutoDist.
        sizes: The number of examples fed in each step.
        batch: The global batch size.
    """
    autodist = None if num_replicas is None else make(num_replicas, strategy)
    with tf.Graph().as_default() as graph, contextlib.ExitStack() as stack:
        if autodist is not None:
            stack.enter_context(autodist.scope())
        v1.set_random_seed(1)
        built = program(batch // (num_replicas or 1))
        if autodist is not None:
            session = autodist.create_distributed_session()
        else:
            session = v1.Session()
            session.run(v1.global_variables_initializer())
            session.run(graph.get_collection(v1.GraphKeys.TABLE_INITIALIZERS))
        steps = sizes if built.feeds else sizes[:3]
        values = [
            session.run(built.fetches, built.feeds(n) if built.feeds else None)
            for n in steps
        ]
        return values, session.run(built.variables)


def assert_equal(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Raises unless two nests hold the same, up to a tolerance."""
    tf.nest.assert_same_structure(actual, expected)
    for a, b in zip(tf.nest.flatten(actual), tf.nest.flatten(expected), strict=True):
        if b is None:
            assert a is None
            continue
        assert np.shape(a) == np.shape(b)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def known(make: Callable[[tf.Tensor], tf.Tensor]) -> tuple[tf.Tensor, Value]:
    """Returns a function's result for examples x [n, 3] in a graph, and its Value."""
    with tf.Graph().as_default() as graph:
        tensor = make(v1.placeholder(tf.float32, [None, 3], "x"))
        return tensor, Values(Program(graph, []).flow).of(tensor)


X = np.random.default_rng(0).normal(size=[7, 3]).astype(np.float32)
PARTS = (4, 1, 2)  # of X


def told(make: Callable[[tf.Tensor], tf.Tensor]) -> Value:
    """Returns what is known of what is made of examples; raises if it is not true.

    That of the whole batch is compared with what follows from those of its parts.
    """
    with tf.Graph().as_default() as graph, v1.Session(config=AS_IT_IS) as session:
        x = v1.placeholder(tf.float32, [None, 3], "x")
        tensor = make(x)
        value = Values(Program(graph, []).flow).of(tensor)
        if value.kind not in _TOLD:
            return value
        assert not value.wholes and value.mixed is None
        fetched = [tensor, tensor if value.over is None else value.over]
        (whole, _), *of_parts = (
            session.run(fetched, {x: examples})
            for examples in (X, *np.split(X, np.cumsum(PARTS)[:-1]))
        )
        if not value.by_value:
            other = session.run(tensor, {x: X[::-1] ** 2})
            np.testing.assert_array_equal(whole, other)
    counts = list(PARTS)
    if value.kind is Kind.RATIO:
        counts = [len(over) for _, over in of_parts]
    check_told(value, whole, [one for one, _ in of_parts], counts)
    return value


def check_told(
    value: Value, whole: Any, of_parts: Sequence[Any], counts: Sequence[int]
) -> None:
    """Raises unless that of a whole batch follows from those of its parts as is told.

    Args:
        value: What is told of it.
        whole: What is computed of the whole batch.
        of_parts: What is computed of each part.
        counts: How many examples each part has; of a ratio, how many were chosen.
    """
    own = [np.asarray(one, np.float64) for one in of_parts]
    own = [one for one, n in zip(own, counts, strict=True) if n]
    power = value.power - (value.kind is Kind.RATIO)
    shares = [n / sum(counts) for n in counts if n]
    scaled = [one / share**power for one, share in zip(own, shares, strict=True)]
    if value.kind is Kind.ROWS:
        expected = _in_order(scaled, value.order, value.axis)
    elif value.kind in (Kind.MAX, Kind.MIN):
        expected = (np.max if value.kind is Kind.MAX else np.min)(own, 0)
    else:
        assert value.kind in (Kind.SAME, Kind.MEAN, Kind.RATIO), value
        expected = np.average(scaled, 0, shares)
        if value.kind is Kind.SAME:
            np.testing.assert_allclose(scaled, [expected] * len(own), rtol=1e-5)
    found = np.asarray(whole, np.float64)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


AS_IT_IS = v1.ConfigProto()  # not optimized, which takes longer than such graphs do
AS_IT_IS.graph_options.rewrite_options.disable_meta_optimizer = True
AS_IT_IS.graph_options.optimizer_options.opt_level = v1.OptimizerOptions.L0
_TOLD = (Kind.SAME, Kind.ROWS, Kind.MEAN, Kind.MAX, Kind.MIN, Kind.RATIO)


def _in_order(values: Sequence[np.ndarray], order: Any, axis: int) -> np.ndarray:
    """Returns the rows of all parts in the order of the whole batch's."""
    if not order:
        return np.concatenate(values, axis)
    _, count, inner = order  # so many rows, or blocks of them, of each example
    split = [np.split(one, count, axis) for one in values]
    blocks = [_in_order(block, inner, axis) for block in zip(*split, strict=True)]
    return np.concatenate(blocks, axis)


@dataclasses.dataclass(frozen=True)
class Copied:
    """A program of one variable w, and its copies for replicas in a graph.

    Attributes:
        program: The program.
        fetches: What was built.
        graph: The graph of the copies.
        places: The copies of the program's ops on each replica.
        components: The variable in place of w on each replica.
    """

    program: Program
    fetches: Any
    graph: tf.Graph
    places: list[stamping.Places]
    components: list[tf.Variable]

    def of(self, one: Any) -> list[Any]:
        """Returns the copies of an op or tensor on all replicas."""
        if isinstance(one, tf.Operation):
            return [places[one] for places in self.places]
        return [stamping.of(places, one) for places in self.places]


def copied(
    build: Callable[[Any], Any],
    initial: np.ndarray,
    once: Callable[[Any], Sequence[tf.Operation]] = lambda fetches: (),
    num_replicas: int = 2,
    is_owned: bool = False,
) -> Copied:
    """Returns what is built of a variable w, copied without any communication.

    Args:
        build: Returns what is fetched, given the variable.
        initial: What w begins with; its components begin with zeros.
        once: Returns the ops that replica 0 alone has, for all.
        num_replicas: On how many devices.
        is_owned: Whether all copies use the component of replica 0.
    """
    made: list[Any] = []
    with tf.Graph().as_default() as source:
        with tf.variable_creator_scope(marked.creator(made)):
            w = tf.Variable(initial, name="w")
            fetches = build(w)
        program = Program(source, made)
    places: list[stamping.Places] = [{} for _ in range(num_replicas)]
    with tf.Graph().as_default() as graph:
        components = []
        for r in range(num_replicas):
            with tf.device(f"CPU:{r}"):
                components.append(tf.Variable(np.zeros_like(initial)))
        shared = stamping.Stamp(source, program.imported)
        stamp = stamping.Stamp(source, program.copied)
        alone = set(once(fetches))
        for r, own in enumerate(places):

            def given(tensor: tf.Tensor, r: int = r) -> tf.Tensor:
                if program.variable_behind(tensor) is None:
                    return stamping.of(places[r], tensor)
                return components[0 if is_owned else r].handle

            own.update(places[0])
            if not r:
                own.update(shared.press(graph, "", given, lambda op: "", {}))
            new = stamp.press(
                *(graph, f"r{r}/", given, lambda op, r=r: f"/CPU:{r}", dict(own)),
                without=alone if r else (),
            )
            own.update(new)
        owned.share(dict.fromkeys(alone, 0), places)
    return Copied(program, fetches, graph, places, components)
