# SPDX-License-Identifier: Apache-2.0
"""Each compressor's values, by NumPy; all replicas receive the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import compressors
from tests import helpers

ALL = ("bf16", "fp16", "int8", "topk(ratio=0.2)", "powersgd(rank=2)")


def reduced(
    values: np.ndarray, compressor: Any, variables: str = "mirrored", **options: Any
) -> np.ndarray:
    """Returns what all replicas receive for their values, asserted bitwise equal."""
    repl = helpers.make(len(values), variables=variables)
    given_ = replicator.PerReplica(*map(tf.constant, values))
    results = repl.run(
        lambda x: repl.all_reduce(x, compressor=compressor, **options), args=[given_]
    )
    first, *others = (result.numpy() for result in results)
    for other in others:
        assert first.tobytes() == other.tobytes()
    return first


def random(replicas: int, *shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal([replicas, *shape]).astype("f")


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)]
)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_casts(name: str, dtype: Any, op: str) -> None:
    values = random(3, 5, 4)
    share = values * np.float32(1 / 3) if op == "mean" else values
    small = share.astype(dtype).astype("f")
    expected = (small[0] + small[1] + small[2]).astype(dtype).astype("f")
    np.testing.assert_array_equal(reduced(values, name, op=op), expected)


def test_int8_is_right_on_average() -> None:
    """Numbers between two multiples of the step are rounded up as often as down."""
    values = np.full([2, 20_000], 0.3, "f")
    values[:, 0] = 62.5  # so that the step is 1
    result = reduced(values, "int8")[1:]
    assert set(np.unique(result)) == {0.0, 1.0, 2.0}
    # The mean of 40,000 roundings of 0.3, with a standard deviation of 0.0023.
    assert abs(result.mean() - 0.6) < 0.02
    # Replicas draw separately: both round up in 9 of 100, and not in 30.
    assert abs((result == 2).mean() - 0.09) < 0.02


def power_iteration(
    values: np.ndarray, rank: int, q: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns P Q^T and Q of algorithm 1 in Vogels et al. 2019, by NumPy."""
    p, _ = np.linalg.qr(sum(matrix @ q for matrix in values))
    q = sum(matrix.T @ p for matrix in values)
    return p @ q.T, q


def test_powersgd_is_a_power_iteration_from_step_to_step() -> None:
    values = random(3, 30, 20).astype("d")
    repl = helpers.make(3)
    with repl.context():
        w = tf.Variable(tf.zeros([30, 20], tf.float64))
        optimizer = repl.wrap_optimizer(
            tf.keras.optimizers.SGD(1.0), op="sum", compressor="powersgd(rank=2)"
        )
    q = tf.random.stateless_normal([20, 2], [0, 2], dtype=tf.float64).numpy()
    given_ = replicator.PerReplica(*map(tf.constant, values))
    for _ in range(4):
        w.assign(tf.zeros_like(w))
        repl.run(lambda x: optimizer.apply([x], [w]), args=[given_])
        expected, q = power_iteration(values, 2, q)
        np.testing.assert_allclose(-w.numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("scale", [2.0**-80, 2.0**80])
def test_powersgd_is_as_good_for_small_and_large_numbers(scale: float) -> None:
    """Their squares exceed float32's range; also in the following steps."""
    values = random(2, 30, 20)
    results = []
    for factor in (1.0, scale):
        repl = helpers.make(2)
        given_ = replicator.PerReplica(*map(tf.constant, values * np.float32(factor)))
        step = repl.build(
            lambda x, repl=repl: repl.all_reduce(x, compressor="powersgd(rank=2)"),
            args=[given_],
        )
        results.append([step(given_)[0].numpy() / np.float32(factor) for _ in range(3)])
    np.testing.assert_allclose(results[1], results[0], atol=1e-4)


def test_powersgd_without_a_warm_start_tries_another_direction() -> None:
    values = random(2, 30, 20)
    repl = helpers.make(2)
    cold = compressors.PowerSGD(rank=2, warm_start=False)
    given_ = replicator.PerReplica(*map(tf.constant, values))
    step = repl.build(lambda x: repl.all_reduce(x, compressor=cold), args=[given_])
    first, second = (step(given_)[0].numpy() for _ in range(2))
    assert np.linalg.matrix_rank(first) == np.linalg.matrix_rank(second) == 2
    assert np.abs(first - second).max() > 0.1


def test_powersgd_starts_later() -> None:
    values = random(2, 30, 20)
    repl = helpers.make(2)
    given_ = replicator.PerReplica(*map(tf.constant, values))
    late = compressors.PowerSGD(rank=2, start_step=2)
    step = repl.build(lambda x: repl.all_reduce(x, compressor=late), args=[given_])
    ranks = [np.linalg.matrix_rank(step(given_)[0].numpy()) for _ in range(4)]
    assert ranks == [20, 20, 2, 2]


def all_reduced(values: Any, name: str) -> Any:
    """Returns what both replicas receive for a list of theirs, the same bits."""
    repl = helpers.make(2)
    given_ = [
        replicator.PerReplica(*map(tf.constant, replica_values))
        for replica_values in values
    ]
    results = repl.run(
        lambda *own: repl.all_reduce(list(own), compressor=name), args=given_
    )
    for one, two in results:
        assert one.numpy().tobytes() == two.numpy().tobytes()
    return [result[0].numpy() for result in results]


SMALL = [(), (1,), (7,), (3, 2), (1, 50), (8, 0), (2, 2, 2), (0,)]


@pytest.mark.battery(5)
@pytest.mark.parametrize("name", [*ALL, "ef(bf16)"])
def test_of_any_shape(name: str) -> None:
    values = [random(2, *shape) for shape in SMALL]
    for own, result in zip(values, all_reduced(values, name), strict=True):
        assert result.shape == own.shape[1:]
        if name.startswith("powersgd"):  # none of them is larger than its factors
            np.testing.assert_array_equal(result, own.sum(0))
        elif "topk" not in name:
            np.testing.assert_allclose(result, own.sum(0), atol=0.1)


@pytest.mark.parametrize("name", ALL)
def test_of_a_shape_that_is_not_known(name: str) -> None:
    values = random(2, 30, 4)
    repl = helpers.make(2)

    def step_fn(x: tf.Tensor) -> tf.Tensor:
        x = helpers.opaque(x, [None, 4])
        return repl.all_reduce(x, compressor=name)

    given_ = replicator.PerReplica(*map(tf.constant, values))
    results = repl.run(step_fn, args=[given_])
    assert results[0].numpy().tobytes() == results[1].numpy().tobytes()
    assert results[0].shape == [30, 4]


def test_of_a_shape_that_is_not_known_nothing_can_be_owed() -> None:
    repl = helpers.make(2)

    def step_fn() -> tf.Tensor:
        x = helpers.opaque(tf.ones([30, 4]), [None, 4])
        return repl.all_reduce(x, compressor="ef(topk)")

    with pytest.raises(
        replicator.ArgumentError,
        match=r"(?s)residual of a tensor of shape \(None, 4\).*in step_fn.*ensure_sh",
    ):
        repl.run(step_fn)


@pytest.mark.parametrize("name", ALL)
def test_what_is_no_number_stays_none(name: str) -> None:
    """Code that checks for it, to skip an update, finds it."""
    values = [random(2, 30, 20) for _ in range(3)]
    values[0][1, 3, 4], values[1][0, 3, 4] = np.nan, np.inf
    one, two, three = all_reduced(values, name)
    assert not np.isfinite(one).all() and not np.isfinite(two).all()
    assert np.isfinite(three).all()


@pytest.mark.parametrize("name", [*ALL, "ef(int8)"])
def test_of_other_dtypes(name: str) -> None:
    dtypes = (tf.float16, tf.bfloat16, tf.float64)
    values = [tf.cast(random(2, 30, 20), dtype).numpy() for dtype in dtypes]
    for own, result in zip(values, all_reduced(values, name), strict=True):
        assert result.dtype == own.dtype and result.shape == (30, 20)
        if name in ("bf16", "fp16", "int8"):
            exact = own.astype("d").sum(0)
            np.testing.assert_allclose(result.astype("d"), exact, atol=0.15)


class Twos(compressors.Compressor):
    """The signs, and the next power of two."""

    def compress(self, tensor: tf.Tensor) -> Any:
        exponents = tf.math.ceil(tf.math.log(tf.abs(tensor)) / tf.math.log(2.0))
        return {"sign": tensor > 0, "exponent": tf.cast(exponents, tf.int8)}

    def decompress(self, payload: Any, shape: tf.Tensor) -> tf.Tensor:
        size = 2.0 ** tf.cast(payload["exponent"], tf.float32)
        return tf.reshape(tf.where(payload["sign"], size, -size), shape)


@pytest.mark.parametrize("variables", ["mirrored", "sharded"])
def test_a_users_own_by_two_methods(variables: str) -> None:
    values = random(3, 4, 5)
    rounded = np.sign(values) * 2.0 ** np.ceil(np.log2(np.abs(values)))
    result = reduced(values, Twos(), variables)
    np.testing.assert_allclose(result, rounded.sum(0), rtol=1e-6)


def test_a_users_own_by_one_method() -> None:
    class Halves(compressors.Compressor):
        def reduce(self, tensors: Any, link: compressors.Link) -> compressors.Sums:
            sent = [tf.round(2 * tensor) / 2 for tensor in tensors]
            return compressors.Sums(link.sum(sent), sent)

    values = random(2, 4, 5)
    expected = (np.round(2 * values) / 2).sum(0)
    np.testing.assert_array_equal(reduced(values, Halves()), expected)
    assert reduced(values, compressors.ErrorFeedback(Halves())).shape == (4, 5)


def _wrong_shape(_: Any, tensors: Any, link: Any) -> Any:
    return compressors.Sums([tensors[0][:1]], tensors)


def _too_few(_: Any, tensors: Any, link: Any) -> Any:
    return compressors.Sums([], [])


def _none(_: Any, tensors: Any, link: Any) -> Any:
    return None


def _sent_of_another_shape(_: Any, tensors: Any, link: Any) -> Any:
    return compressors.Sums(tensors, [tf.zeros([1])] * len(tensors))


@pytest.mark.parametrize("feed_back", [False, True])
@pytest.mark.parametrize(
    "method", [_wrong_shape, _too_few, _none, _sent_of_another_shape]
)
def test_a_users_own_that_returns_nonsense(
    method: Callable[..., Any], feed_back: bool
) -> None:
    wrong = type("Wrong", (compressors.Compressor,), {"reduce": method})()
    with pytest.raises(
        replicator.ArgumentError, match=r"(?s)reduce of Wrong returned .*Sums"
    ):
        reduced(
            random(2, 4, 5), compressors.ErrorFeedback(wrong) if feed_back else wrong
        )


def test_a_users_own_without_a_method() -> None:
    class Half(compressors.Compressor):
        def compress(self, tensor: tf.Tensor) -> Any:
            return tensor

    class NoReturn(Half):
        def decompress(self, payload: Any, shape: tf.Tensor) -> Any:
            return None

    message = "(?s)Half has no method `decompress`.*Fix: define"
    with pytest.raises(replicator.ArgumentError, match=message):
        reduced(random(2, 4, 5), Half())
    message = "(?s)decompress of NoReturn returned None.*Fix: return"
    with pytest.raises(replicator.ArgumentError, match=message):
        reduced(random(2, 4, 5), NoReturn())


def test_a_users_own_of_another_shape() -> None:
    class Short(Twos):
        def decompress(self, payload: Any, shape: tf.Tensor) -> tf.Tensor:
            return tf.zeros([3])

    with pytest.raises(
        replicator.ArgumentError, match=r"decompress of Short returned .*\(3,\)"
    ):
        reduced(random(2, 4, 5), Short())
