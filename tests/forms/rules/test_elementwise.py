# SPDX-License-Identifier: Apache-2.0
"""Rules of element-wise ops."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.forms import engine
from tests.forms.laws import SUM, WHOLE, Sample, nary, op, unary, v

raw = tf.raw_ops
ROW = np.array([0.3, -0.7, 1.5], np.float32)

REAL = """
    Abs Asinh Atan BesselI0 BesselI0e BesselI1 BesselI1e Ceil Cos Cosh Dawsn Elu Erf
    Erfc Exp Expm1 FakeQuantWithMinMaxArgs Floor FresnelCos FresnelSin IsFinite IsInf
    IsNan LeakyRelu Neg Reciprocal Relu Relu6 Rint Round Selu Sigmoid Sign Sin Sinh
    Softplus Softsign Square StopGradient Tan Tanh Identity Snapshot PreventGradient
    ZerosLike OnesLike Inv
"""
POSITIVE = """
    Acos Asin Atanh BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0
    BesselY1 Digamma Erfinv Expint Lgamma Log Log1p Ndtri Rsqrt Spence Sqrt
"""
TWO = """
    Add AddV2 Atan2 Div DivNoNan EluGrad Equal FakeQuantWithMinMaxArgsGradient
    FloorDiv FloorMod Greater GreaterEqual InvGrad LeakyReluGrad Less LessEqual
    Maximum Minimum Mul MulNoNan NextAfter NotEqual RealDiv ReciprocalGrad Relu6Grad
    ReluGrad RsqrtGrad SeluGrad SigmoidGrad SoftplusGrad SoftsignGrad SqrtGrad
    SquaredDifference Sub TanhGrad ApproximateEqual Complex
"""
TWO_POSITIVE = """
    Igamma Igammac IgammaGradA Pow RandomGammaGrad Xdivy Xlog1py Xlogy
"""
SAMPLES = [
    *unary(REAL, grads=False),
    *unary(POSITIVE, "p", grads=False),
    *nary(TWO, "xy", grads=False),
    *nary(TWO_POSITIVE, "pq", grads=False),
    *nary("BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift", "ij"),
    *nary("LogicalAnd LogicalOr", "bc"),
    *unary("LogicalNot", "b"),
    *unary("Angle ComplexAbs Conj Imag Real", "z"),
    *unary("AsString DataFormatDimMap Invert PopulationCount", "i"),
    *unary("EncodeBase64 StringLength StringLower StringStrip StringUpper", "s"),
    *unary("StringToNumber", "s"),
    Sample("UnicodeScript", lambda v: raw.UnicodeScript(input=v.i)),
    Sample("Acosh", lambda v: raw.Acosh(x=v.p + 1)),
    Sample("AddN", lambda v: raw.AddN(inputs=[v.x, v.y, v.p])),
    op("Betainc", a=v.p, b=v.q, x=lambda v: v("p")[:, tf.newaxis] * v.q / v.q),
    Sample("Bucketize", lambda v: raw.Bucketize(input=v.x, boundaries=[-1.0, 0.5])),
    Sample("Cast", lambda v: raw.Cast(x=v.x, DstT=tf.int32)),
    Sample("CheckNumerics", lambda v: raw.CheckNumerics(tensor=v.x, message="m")),
    Sample("CheckNumericsV2", lambda v: raw.CheckNumericsV2(tensor=v.x, message="m")),
    op("ClipByValue", t=v.x, clip_value_min=-1.0, clip_value_max=1.0),
    Sample("DecodeBase64", lambda v: raw.DecodeBase64(input=tf.io.encode_base64(v.s))),
    op("FakeQuantWithMinMaxVars", inputs=v.x, min=-2.0, max=2.5),
    op(
        "FakeQuantWithMinMaxVarsPerChannel", inputs=v.x, min=-np.abs(ROW), max=[1.0] * 3
    ),
    Sample("Mod", lambda v: raw.Mod(x=v.i, y=v.j + 1)),
    Sample("TruncateDiv", lambda v: raw.TruncateDiv(x=v.i - 3, y=v.j + 1)),
    Sample("TruncateMod", lambda v: raw.TruncateMod(x=v.i - 3, y=v.j + 1)),
    Sample("Polygamma", lambda v: raw.Polygamma(a=tf.ones_like(v.p), x=v.p)),
    Sample("Zeta", lambda v: raw.Zeta(x=v.p + 1, q=v.q)),
    Sample("RegexFullMatch", lambda v: raw.RegexFullMatch(input=v.s, pattern="1.")),
    op("RegexReplace", input=v.s, pattern="1", rewrite="a"),
    op("StaticRegexFullMatch", input=v.s, pattern="1."),
    op("StaticRegexReplace", input=v.s, pattern="1", rewrite="a"),
    Sample("StringJoin", lambda v: raw.StringJoin(inputs=[v.s, tf.constant("b")])),
    op("StringToHashBucket", string_tensor=v.s, num_buckets=9),
    op("StringToHashBucketFast", input=v.s, num_buckets=9),
    op("StringToHashBucketStrong", input=v.s, num_buckets=9, key=[1, 2]),
    Sample("Substr", lambda v: raw.Substr(input=v.s, pos=0, len=1)),
    op(
        "UnicodeTranscode",
        input=v.s,
        input_encoding="UTF-8",
        output_encoding="UTF-16-BE",
    ),
    Sample("SelectV2", lambda v: raw.SelectV2(condition=v.b, t=v.x, e=ROW)),
    Sample("Select", lambda v: raw.Select(condition=v.b, x=v.x, y=v.y)),
    Sample("Select", lambda v: raw.Select(condition=v("b"), x=v.x, y=v.y)),
    op("Select", condition=lambda v: v.x[:1, :1][0, 0] > 9, x=v.x, y=v.y),
    Sample("EnsureShape", lambda v: raw.EnsureShape(input=v.x, shape=[None, 3])),
    Sample("IdentityN", lambda v: raw.IdentityN(input=[v.x, v.i])),
    # Broadcasting: rows and columns that one operand does not have.
    Sample("Add", lambda v: raw.Add(x=v.x, y=ROW)),
    Sample("Sub", lambda v: raw.Sub(x=ROW, y=v.x)),
    Sample("Mul", lambda v: raw.Mul(x=v("x", 1), y=v.y)),
    Sample("Mul", lambda v: raw.Mul(x=v("x", 2, 3), y=ROW)),
    Sample("Maximum", lambda v: raw.Maximum(x=v("x"), y=tf.reshape(ROW, [3, 1]))),
    Sample("Sub", lambda v: raw.Sub(x=v("x", 1), y=tf.transpose(v("y", 1)))),
    Sample("AddV2", lambda v: raw.AddV2(x=v("x"), y=tf.ones([2, 4, 1]))),
]


def half(x: tf.Tensor) -> tf.Tensor:
    """Returns small whole numbers, of which 16 bits hold any sum."""
    return tf.cast(tf.round(x), tf.float16)


def total(x: tf.Tensor) -> tf.Tensor:
    """Returns a sum over the batch, which replicas have summands of."""
    return raw.Sum(input=x, axis=[0])


SUMS = [
    Sample("Neg", lambda v: raw.Neg(x=total(v.x)), SUM),
    Sample("Mul", lambda v: raw.Mul(x=total(v.x), y=ROW), SUM),
    Sample("Mul", lambda v: raw.Mul(x=total(v.x), y=total(v.y)), WHOLE),
    Sample("RealDiv", lambda v: raw.RealDiv(x=total(v.x), y=ROW), SUM),
    Sample("RealDiv", lambda v: raw.RealDiv(x=ROW, y=total(v.x)), WHOLE),
    Sample("Div", lambda v: raw.Div(x=total(v.j), y=[2, 2, 2]), WHOLE),
    Sample("DivNoNan", lambda v: raw.DivNoNan(x=total(v.x), y=[1.0, 0.0, 2.0]), SUM),
    Sample("MulNoNan", lambda v: raw.MulNoNan(x=total(v.x), y=ROW), SUM),
    Sample("AddV2", lambda v: raw.AddV2(x=total(v.x), y=1.5), SUM),
    Sample("Sub", lambda v: raw.Sub(x=1.5, y=total(v.x)), SUM),
    Sample("AddV2", lambda v: raw.AddV2(x=total(v.x), y=np.ones([2, 3], "f")), WHOLE),
    Sample("AddN", lambda v: raw.AddN(inputs=[total(v.x), total(v.y)]), SUM),
    Sample("Complex", lambda v: raw.Complex(real=total(v.x), imag=ROW), SUM),
    op("SelectV2", SUM, condition=ROW > 0, t=lambda v: total(v.x), e=ROW),
    Sample("Cast", lambda v: raw.Cast(x=total(v.x), DstT=tf.float64), SUM),
    Sample("Cast", lambda v: raw.Cast(x=total(v.x), DstT=tf.float16), WHOLE),
    Sample("Cast", lambda v: raw.Cast(x=total(half(v.x)), DstT=tf.float32), WHOLE),
    Sample("Cast", lambda v: raw.Cast(x=total(v("i", 2)), DstT=tf.float32), WHOLE),
    Sample("Square", lambda v: raw.Square(x=total(v.x)), WHOLE),
    op("CheckNumerics", WHOLE, tensor=lambda v: total(v.x), message="m"),
    Sample("ReluGrad", lambda v: raw.ReluGrad(gradients=total(v.x), features=ROW), SUM),
    op("ReluGrad", WHOLE, gradients=ROW, features=lambda v: total(v.x)),
    Sample("TanhGrad", lambda v: raw.TanhGrad(y=ROW, dy=total(v.x)), SUM),
    Sample("TanhGrad", lambda v: raw.TanhGrad(y=total(v.x), dy=ROW), WHOLE),
    Sample(
        "Identity",
        lambda v: raw.Identity(input=raw.Max(input=v.x, axis=[0])),
        SUM,
        grads=False,  # which compares with the maximum
    ),
    Sample("ZerosLike", lambda v: raw.ZerosLike(x=total(v.x)), WHOLE),
    Sample("IdentityN", lambda v: raw.IdentityN(input=[total(v.x)]), SUM),
    # An integer that wraps is a sum, too.
    Sample("Mul", lambda v: raw.Mul(x=total(v.i) + 2**30, y=[7, 9, 11]), SUM),
]


def test_the_length_of_a_sharded_axis_is_ensured_as_a_whole() -> None:
    repl = replicator.Replicator(["cpu:0", "cpu:1"])
    spec = tf.TensorSpec([None, 3])
    run = engine.WholeBatchFunction(
        lambda x: tf.ensure_shape(x, [4, 3]) * 2, repl, [spec]
    )
    np.testing.assert_array_equal(run(np.ones([4, 3], np.float32)), np.full([4, 3], 2))
    with pytest.raises(tf.errors.InvalidArgumentError, match="not compatible"):
        run(np.ones([5, 3], np.float32))


def test_assertions_are_of_the_whole_batch() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        tf.debugging.assert_greater(tf.reduce_sum(x), 3.0)
        tf.debugging.assert_positive(x)
        return tf.identity(x)

    repl = replicator.Replicator(["cpu:0", "cpu:1"])
    run = engine.WholeBatchFunction(step, repl, [tf.TensorSpec([None])])
    run(np.ones([4], np.float32))  # each replica's sum is 2
    with pytest.raises(tf.errors.InvalidArgumentError):
        run(np.array([4.0, 1.0, 1.0, -1.0], np.float32))


def test_rows_that_broadcast_on_one_device_are_not_lost() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        return x + np.arange(5, dtype=np.float32)

    repl = replicator.Replicator(["cpu:0", "cpu:1"])
    spec = tf.TensorSpec([None])
    run = engine.WholeBatchFunction(step, repl, [spec], empty=True)
    x = np.ones([5], np.float32)
    np.testing.assert_array_equal(run(x), step(x))
    with pytest.raises(tf.errors.InvalidArgumentError):
        run(x[:1])


def test_what_only_passes_on_is_built_where_control_edges_need_it() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([tf.identity(v.assign_add(tf.reduce_sum(x)))]):
            seen = tf.identity(v.read_value())
        return tf.stop_gradient(tf.identity_n([x, x * seen])[1])

    repl = replicator.Replicator(["cpu:0", "cpu:1"])
    with repl.context():
        v = tf.Variable(0.0)
    run = engine.WholeBatchFunction(step, repl, [tf.TensorSpec([None])])
    np.testing.assert_array_equal(run(np.float32([1, 2, 3])), [6, 12, 18])
    built = run.function((0,)).graph.get_operations()
    kinds = [op.type for op in built if op.name.startswith("replica_0")]
    assert "IdentityN" not in kinds
