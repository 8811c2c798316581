# SPDX-License-Identifier: Apache-2.0
"""Reshapes, transposes, slices, concatenations, sorts and the like."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.forms.programs.values import Builder, Dims, Made, calm, rounded, without


def reshaped(p: Builder) -> Made:
    """Joins two neighbouring dimensions, or divides one."""
    a, dims, k = p.axis_of(2)
    k, size = min(k, len(dims) - 2), tf.shape(a)
    one, other = dims[k : k + 2]
    both = isinstance(one, int) and isinstance(other, int)
    name = int(one) * int(other) if both else f"({one}*{other})"
    made: list[Any] = [*dims[:k], name, *dims[k + 2 :]]
    sizes = [size[:k], [size[k] * size[k + 1]]]
    if other in (2, 4, 6) and p.chance():
        made = [*dims[: k + 1], 2, int(other) // 2, *dims[k + 2 :]]
        sizes = [size[: k + 1], [2, int(other) // 2]]
    shape = [-1 if isinstance(d, str) else d for d in made]
    if shape.count(-1) > 1 or p.chance():
        shape = tf.concat([*sizes, size[k + 2 :]], 0)
    return tf.reshape(a, shape), made


def and_back(p: Builder) -> Made:
    """Computes on [-1, d], and returns to the shape from before."""
    a, dims = p.pick(lambda dims: len(dims) > 1 and isinstance(dims[-1], int))
    last = int(dims[-1])
    flat = tf.reshape(a, [-1, last])
    w = p.variables["w"] if last == 3 else p.variables["u"] if last == 4 else None
    made = tf.sin(flat) if w is None else tf.tanh(flat @ w)
    width = last if w is None else w.shape[1]
    options: list[Any] = [
        lambda: tf.reshape(made, tf.concat([tf.shape(a)[:-1], [width]], 0)),
        lambda: tf.reshape(made, [*tf.unstack(tf.shape(a))[:-1], width]),
        lambda: tf.reshape(
            made, tf.stack([*(tf.shape(a)[k] for k in range(len(dims) - 1)), width])
        ),
    ]
    if sum(isinstance(d, str) for d in dims) == 1:
        options += [
            lambda: tf.reshape(
                made, [-1 if isinstance(d, str) else d for d in [*dims[:-1], width]]
            )
        ]
    return p.of(options)(), [*dims[:-1], width]


def flattened(p: Builder) -> Made:
    a, dims = p.pick(lambda dims: len(dims) > 1)
    options: list[Any] = [
        lambda: (tf.reshape(a, [-1]), [f"all{dims}"]),
        lambda: (tf.reshape(tf.transpose(a), [-1]), [f"turned{dims}"]),
        lambda: (tf.reshape(a, [1, -1]), [1, f"all{dims}"]),
        lambda: (tf.reshape(a, [tf.shape(a)[0], -1]), [dims[0], f"rest{dims[1:]}"]),
        lambda: (tf.reshape(a, [tf.size(a)]), [f"all{dims}"]),
    ]
    return p.of(options)()


def moved(p: Builder) -> Made:
    """Moves elements along one axis, or takes some."""
    a, dims, k = p.axis_of()
    name, is_number = dims[k], isinstance(dims[k], int)

    def cut(*part):
        return a[(*[slice(None)] * k, slice(*part))]

    def at_k(one, other):
        return [one if at == k else other for at in range(len(dims))]

    fewer = int(name) - 1 if is_number else f"({name}-1)"
    more = int(name) + 1 if is_number else f"({name}+1)"
    twice = 2 * int(name) if is_number else f"2{name}"
    order = [int(axis) for axis in p.rng.permutation(len(dims))]
    half = -(-int(name) // 2) if is_number else f"({name}/2)"
    options: list[Any] = [
        lambda: (tf.transpose(a, order), [dims[axis] for axis in order]),
        lambda: (tf.reverse(a, [k]), dims),
        lambda: (tf.roll(a, int(p.rng.integers(1, 3)), k), dims),
        lambda: (cut(1, None), without(dims, k, fewer)),
        lambda: (cut(None, -1), without(dims, k, fewer)),
        lambda: (cut(1, None) - cut(None, -1), without(dims, k, fewer)),
        lambda: (cut(0, 1), without(dims, k, 1)),
        lambda: (cut(None, None, 2), without(dims, k, half)),
        lambda: (cut(None, None, -1), dims),
        lambda: (a[(*[slice(None)] * k, 0)], without(dims, k)),
        lambda: (a[(*[slice(None)] * k, -1)], without(dims, k)),
        lambda: (a[(*[slice(None)] * k, tf.shape(a)[k] // 2)], without(dims, k)),
        lambda: (tf.concat([a, 2 * a], k), without(dims, k, twice)),
        lambda: (tf.concat([a, cut(0, 1)], k), without(dims, k, more)),
        lambda: (tf.tile(a, at_k(2, 1)), without(dims, k, twice)),
        lambda: (tf.repeat(a, 2, k), without(dims, k, twice)),
        lambda: (tf.pad(a, at_k([1, 0], [0, 0])), without(dims, k, more)),
        lambda: (tf.pad(a, at_k([0, 1], [0, 0]), "SYMMETRIC"), without(dims, k, more)),
        lambda: (tf.expand_dims(a, k), without(dims, k, 1, name)),
        lambda: (tf.squeeze(a[(*[slice(None)] * k, None)], k), dims),
        lambda: (tf.stack([a, tf.sin(a)], k), without(dims, k, 2, name)),
        lambda: (tf.stack([a, tf.sin(a)], -1), [*dims, 2]),
        lambda: (tf.split(tf.concat([a, a * a], k), 2, k)[1], dims),
        lambda: (tf.add_n(tf.unstack(tf.stack([a, tf.cos(a)], k), 2, k)), dims),
        lambda: (tf.slice(a, [0] * len(dims), at_k(1, -1)), without(dims, k, 1)),
        lambda: (
            tf.broadcast_to(tf.reduce_mean(a, k, keepdims=True), tf.shape(a)),
            dims,
        ),
        lambda: (tf.linalg.diag(a), [*dims, dims[-1]]),
        lambda: (
            (tf.meshgrid(a, tf.cos(a))[1], dims * 2) if len(dims) == 1 else (a, dims)
        ),
        lambda: (tf.strided_slice(a, at_k(0, 0), tf.shape(a), at_k(1, 1)), dims),
    ]
    return p.of(options)()


def ordered(p: Builder) -> Made:
    """Sorts, or takes what is largest."""
    a, dims, k = p.decisive_axis()
    last = dims[-1]

    def best():
        return tf.math.top_k(a, tf.minimum(2, tf.shape(a)[-1]))

    options: list[Any] = [
        lambda: (tf.sort(a, k), dims),
        lambda: (tf.sort(a, k, "DESCENDING"), dims),
        lambda: (p.number(tf.argmax(a, k)) / 4, without(dims, k)),
        lambda: (p.number(tf.argmin(a, k)) / 4, without(dims, k)),
        lambda: (p.number(tf.argsort(a, k, stable=True)) / 4, dims),
        lambda: (
            tf.gather(a, tf.argsort(a, -1, stable=True), batch_dims=len(dims) - 1),
            dims,
        ),
        lambda: (best().values[..., :1], [*dims[:-1], 1]),
        lambda: (p.number(best().indices[..., 0]) / 4, dims[:-1]),
        lambda: (tf.sort(a, -1)[..., tf.shape(a)[-1] // 2], dims[:-1]),
        lambda: (tf.cumsum(tf.sort(a, k), k) / (1 + p.number(tf.shape(a)[k])), dims),
    ]
    if len(dims) > 1 and isinstance(last, int):
        options += [
            lambda: (tf.one_hot(tf.argmax(a, -1), last, dtype=p.dtype), dims),
            lambda: (
                tf.gather(tf.tanh(a), tf.argmax(a, -1), batch_dims=len(dims) - 1),
                dims[:-1],
            ),
        ]
    if len(dims) == 1:
        options += [
            lambda: (p.number(tf.searchsorted(tf.sort(a), a + 0.331e-6)) / 4, dims),
            lambda: (tf.gather(a, tf.argsort(tf.argsort(a, stable=True))), dims),
            lambda: (tf.sort(a)[tf.shape(a)[0] // 2], ()),
        ]
    return p.of(options)()


def of_sequences(p: Builder) -> Made:
    """Computes on sequences with lengths: time-major, masked, reversed, the last."""
    t, lengths = p.given["t"], p.given["lengths"]
    times = p.values[[v.maker for v in p.values].index("t")].dims[1]
    a, dims = p.pick(lambda d: d[:2] == ("n", times) and len(d) == 3)
    if dims[:2] != ("n", times):
        a, dims = t, ("n", times, 3)
    mask = tf.sequence_mask(lengths, tf.shape(a)[1], p.dtype)
    last: Any = tf.range(p.n)
    options: list[Any] = [
        lambda: (a * mask[:, :, None], dims),
        lambda: (
            tf.reduce_sum(a * mask[:, :, None], 1) / p.number(lengths)[:, None],
            [*dims[:1], dims[2]],
        ),
        lambda: (tf.gather(a, lengths - 1, batch_dims=1), [dims[0], dims[2]]),
        lambda: (tf.gather_nd(a, tf.stack([last, lengths - 1], 1)), [dims[0], dims[2]]),
        lambda: (tf.reverse_sequence(a, lengths, 1, 0), dims),
        lambda: (tf.transpose(a, [1, 0, 2]), [dims[1], dims[0], dims[2]]),
        lambda: (
            a[:, 1:] - a[:, :-1],
            [
                dims[0],
                f"{dims[1]}-1" if isinstance(dims[1], str) else dims[1] - 1,
                dims[2],
            ],
        ),
        lambda: (
            tf.reduce_max(rounded(a) if p.is_exact else t, 1),
            [dims[0], dims[2] if p.is_exact else 3],
        ),
        lambda: (tf.boolean_mask(a, mask > 0), [f"words{p._step}", dims[2]]),
        lambda: (
            tf.reduce_sum(tf.nn.softmax(a + (mask[:, :, None] - 1) * 9, 1) * a, 1),
            [dims[0], dims[2]],
        ),
        lambda: (
            tf.einsum("nqd,nkd->nqk", a, calm(a)) / 3,
            [dims[0], dims[1], dims[1]],
        ),
        lambda: (tf.matmul(tf.nn.softmax(tf.matmul(a, a, transpose_b=True)), a), dims),
        lambda: (
            tf.reshape(tf.transpose(a, [1, 0, 2]), [-1, a.shape[2]]),
            [f"({dims[1]}*n)", dims[2]],
        ),
        lambda: (tf.reduce_sum(a * mask[:, :, None]) / tf.reduce_sum(mask), ()),
        lambda: (tf.nn.avg_pool1d(a, 2, 1, "SAME"), dims),
        lambda: (
            tf.reduce_mean(tf.concat([a, tf.reverse(a, [1])], 2), 1),
            [dims[0], 2 * dims[2]],
        ),
        lambda: (
            tf.RaggedTensor.from_tensor(a, lengths).to_tensor(
                shape=[None, None, a.shape[2]]
            )[:, :1],
            [dims[0], 1, dims[2]],
        ),
        lambda: (
            tf.reduce_mean(tf.RaggedTensor.from_tensor(a, lengths), 1),
            [dims[0], dims[2]],
        ),
    ]
    made, found = p.of(options)()
    return calm(made), found


def of_images(p: Builder) -> Made:
    """Convolutions and pools over sequences as images, with their normalization."""
    a, dims = p.pick(lambda d: len(d) == 3 and d[0] == "n")
    if len(dims) != 3 or dims[0] != "n" or dims[2] != 3:
        times: Any = p.values[[v.maker for v in p.values].index("t")].dims[1]
        a, dims = p.given["t"], ("n", times, 3)
    # In float32, oneDNN takes no empty batch: the shape of a convolution is
    # wrong, and the gradient of a pool ends the process.
    image, kernel = (
        tf.cast(v, tf.float64) for v in (tf.expand_dims(a, 1), p.variables["w"])
    )
    made = image @ kernel
    filters = tf.cast(p.variables["u"], tf.float64)[None, None, :, :1]
    options: list[Any] = [
        lambda: tf.nn.max_pool2d(made, [1, 1], 1, "SAME"),
        lambda: tf.nn.avg_pool2d(made, [1, 2], 1, "SAME"),
        lambda: tf.nn.conv2d(
            made, filters * tf.ones([1, 2, 1, 4], tf.float64), 1, "SAME"
        ),
        lambda: tf.nn.depthwise_conv2d(
            made, tf.ones([1, 2, 4, 1], tf.float64) / 2, [1] * 4, "SAME"
        ),
        lambda: tf.nn.batch_normalization(
            made, *tf.nn.moments(made, [0, 1, 2]), None, None, 0.1
        ),
        lambda: tf.nn.space_to_batch(made, [1, 1], [[0, 0], [0, 0]]),
    ]
    if not p.is_exact:
        options += [
            lambda: tf.compat.v1.nn.fused_batch_norm(
                tf.cast(made, tf.float32), tf.ones([4]), tf.zeros([4]), epsilon=0.1
            )[0]
        ]
    result = p.number(p.of(options)())
    return calm(tf.squeeze(result, 1)), [dims[0], dims[1], 4]


def joined(p: Builder) -> Made:
    """Concatenates or stacks two values."""
    a, dims = p.pick(lambda d: len(d) > 0)
    b, _ = p.pick(lambda other: other == dims)
    k = int(p.rng.integers(len(dims)))
    name: Dims = dims[k : k + 1]
    twice = 2 * int(name[0]) if isinstance(name[0], int) else f"2{name[0]}"
    options: list[Any] = [
        lambda: (tf.concat([a, b], k), without(dims, k, twice)),
        lambda: (tf.stack([a, b], k), without(dims, k, 2, dims[k])),
        lambda: (
            tf.concat([a, tf.zeros_like(b), b], k),
            without(
                dims, k, f"3{name[0]}" if twice.__class__ is str else 3 * int(name[0])
            ),
        ),
        lambda: (tf.reduce_mean(tf.split(tf.concat([a, b], k), 2, k), 0), dims),
        lambda: (tf.math.accumulate_n([a, b, a]), dims),
        lambda: (tf.where(tf.tanh(b) > 2, a, b), dims),
    ]
    return p.of(options)()


MAKERS = (
    *(reshaped, and_back, flattened, moved, moved, moved, ordered, ordered),
    *(of_sequences, of_sequences, of_images, joined),
)
