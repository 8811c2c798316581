# SPDX-License-Identifier: Apache-2.0
"""Ops that compute each element of one element of each input, which may broadcast.

Of sharded inputs, each replica computes its own elements. A sum over the replicas,
which is still to be taken, passes through what is linear.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Sequence
from typing import Any

import tensorflow as tf

from replicator._tf import ops
from replicator.forms import sizes
from replicator.forms.equations import by_axes
from replicator.forms.forms import REPLICATED, Fact, Sharded, Unset, joined
from replicator.forms.rule import (
    AS_IS,
    OpPlan,
    is_partial,
    of_rows,
    of_sums,
    plan,
    rule,
)

TYPES = """
    Abs Acos Acosh Add AddN AddV2 Angle ApproximateEqual AsString Asin Asinh Atan
    Atan2 Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0
    BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Betainc BitwiseAnd BitwiseOr
    BitwiseXor Bucketize Cast Ceil CheckNumerics CheckNumericsV2 ClipByValue Complex
    ComplexAbs Conj Cos Cosh DataFormatDimMap Dawsn DecodeBase64 Digamma Div
    DivNoNan Elu EluGrad EncodeBase64 Equal Erf Erfc Erfinv Exp Expint Expm1
    FakeQuantWithMinMaxArgs FakeQuantWithMinMaxArgsGradient FakeQuantWithMinMaxVars
    FakeQuantWithMinMaxVarsPerChannel Floor FloorDiv FloorMod FresnelCos FresnelSin
    Greater GreaterEqual Igamma IgammaGradA Igammac Imag Inv InvGrad Invert IsFinite
    IsInf IsNan LeakyRelu LeakyReluGrad LeftShift Less LessEqual Lgamma Log Log1p
    LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan Ndtri Neg
    NextAfter NotEqual Polygamma PopulationCount Pow RandomGammaGrad Real RealDiv
    Reciprocal ReciprocalGrad RegexFullMatch RegexReplace Relu Relu6 Relu6Grad
    ReluGrad RightShift Rint Round Rsqrt RsqrtGrad SelectV2 Selu SeluGrad Sigmoid
    SigmoidGrad Sign Sin Sinh Softplus SoftplusGrad Softsign SoftsignGrad Spence
    Sqrt SqrtGrad Square SquaredDifference StaticRegexFullMatch StaticRegexReplace
    StringJoin StringLength StringLower StringStrip StringToHashBucket
    StringToHashBucketFast StringToHashBucketStrong StringToNumber StringUpper Sub
    Substr Tan Tanh TanhGrad TruncateDiv TruncateMod UnicodeScript UnicodeTranscode
    Xdivy Xlog1py Xlogy Zeta
"""
MOVING = "Identity IdentityN StopGradient PreventGradient Snapshot"
# Linear in this input, if the others are fixed. Not Xdivy and MulNoNan in the second:
# they take zeros for special, which summands of what is not zero may be. Not
# CheckNumerics, as a sum may overflow.
_LINEAR = {
    0: """
        Cast Conj Div DivNoNan EluGrad FakeQuantWithMinMaxArgsGradient Imag
        LeakyReluGrad Mul MulNoNan Neg Real RealDiv Relu6Grad ReluGrad SeluGrad
        SoftplusGrad SoftsignGrad
    """.split(),
    1: "InvGrad Mul ReciprocalGrad RsqrtGrad SigmoidGrad SqrtGrad TanhGrad".split(),
}
# Linear in several inputs together.
_TOGETHER: dict[str, Container[int]] = {
    **dict.fromkeys("AddV2 Add Sub Complex".split(), (0, 1)),
    **dict.fromkeys("SelectV2 Select".split(), (1, 2)),
    "AddN": range(2**31),
}


@rule(TYPES)
def elementwise(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """The rule of ops that compute each element alone."""
    if op.outputs[0].dtype == tf.variant:  # a sum of lists
        forms = [fact.form for fact in facts]
        form = functools.reduce(lambda a, b: joined(a, b, True), forms)
        return plan(op, [form] * len(facts), form)
    if not any(isinstance(fact.form, Sharded) for fact in facts):
        return linear(op, facts)
    return by_axes(op, facts, ",".join(["..."] * len(facts)) + "->...")


def linear(op: tf.Operation, facts: list[Fact]) -> OpPlan | None:
    """Returns the plan of an op on sums that it need not wait for, or None.

    Infinite factors are taken for numbers: what is not finite on one device is not
    finite on replicas, but may be NaN instead of an infinity.
    """
    partial = [k for k, fact in enumerate(facts) if is_partial(fact)]
    if not partial or not _is_exact(op) or any(_grows(op, k) for k in partial):
        return None
    is_alone = len(partial) == 1 and op.type in _LINEAR.get(partial[0], ())
    return of_sums(op, facts, partial if is_alone else _TOGETHER.get(op.type, ()))


def _is_exact(op: tf.Operation) -> bool:
    """Whether an op is linear for numbers of its type, too."""
    dtype, made = op.inputs[0].dtype, op.outputs[0].dtype
    if op.type == "Cast":
        # Narrower types would round each summand, and integers beyond 2^24 are no sums
        # of float32. A sum of float16 may overflow, on which scales of losses depend.
        is_real = dtype.is_floating and made.is_floating
        is_alike = is_real or (dtype.is_complex and made.is_complex)
        is_wider = dtype.size < made.size and dtype != tf.float16
        return is_alike and (dtype == made or is_wider)
    is_quotient = op.type in ("Div", "RealDiv", "DivNoNan")
    return not is_quotient or dtype.is_floating or dtype.is_complex


def _grows(op: tf.Operation, k: int) -> bool:
    """Whether an input, which is then added up first, is smaller than the output."""
    source, result = op.inputs[k].shape, op.outputs[0].shape
    if source.rank is None or source.rank != result.rank:
        return True
    sizes = source.num_elements(), result.num_elements()
    return None not in sizes and sizes[0] != sizes[1]


@rule("Select")
def select(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """The rule of Select, in which a vector of conditions chooses whole rows."""
    if op.inputs[0].shape.rank != 1 or op.inputs[1].shape.rank == 1:
        return elementwise(op, facts, scope)
    return linear(op, facts) or by_axes(op, facts, "a,a...,a...->a...")


@of_rows("EnsureShape")
def ensured(op: tf.Operation, form: Sharded, facts: list[Fact]) -> OpPlan | None:
    """The rule of EnsureShape: only the whole batch says how long it is."""
    shape = tf.TensorShape(op.get_attr("shape"))
    is_known = shape.rank and shape.as_list()[form.axis] is not None
    return None if is_known else plan(op, [form], form)


@rule(MOVING)
def identities(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan:
    """The rule of ops that pass on what they are given, in whatever form.

    Only control edges tell them from their inputs, as no gradient leaves a step.
    Without them, a sum is seen to be one of products: Keras' optimizers pass all
    gradients through one IdentityN, which computes each as long as one is used.
    """
    has_edges = op.control_inputs or ops.control_outputs(op)
    is_built = has_edges or any(map(sizes.has_local, facts))
    forms = [fact.form for fact in facts]
    return OpPlan(forms, facts, build=None if is_built else _passed_on)


def _passed_on(
    replica: Any, op: tf.Operation, inputs: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor]:
    return inputs


@rule("ZerosLike OnesLike")
def like(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan:
    """The rule of zeros and ones like a tensor, of which only the shape is needed."""
    form = facts[0].form
    is_kept = isinstance(form, Sharded | Unset) or op.outputs[0].dtype == tf.variant
    return plan(op, [AS_IS], form if is_kept else REPLICATED)


@rule("Assert")
def asserted(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan:
    """The rule of Assert, of which each replica prints what it has itself."""
    return OpPlan([REPLICATED] + [AS_IS] * (len(op.inputs) - 1), [])
