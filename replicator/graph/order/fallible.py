# SPDX-License-Identifier: Apache-2.0
"""Which ops can fail when a step runs, and which write variables.

An op counts as safe if its type is listed here, for any values of its operands,
provided that static shapes are known; all other ops can fail. Failures of memory or of
a device are not considered. Reads graphs and changes none.
"""

from __future__ import annotations

import tensorflow as tf

from replicator._tf import functions
from replicator.graph.ir.kinds import kind_of, resource_inputs, touched
from replicator.graph.order.effects import writes_at

# Never fail, whatever the shapes.
_ALWAYS = frozenset(
    """
    Const Placeholder PlaceholderWithDefault Identity IdentityN StopGradient NoOp
    PreventGradient Shape ShapeN Size Rank ZerosLike OnesLike Snapshot
    ReadVariableOp VariableShape VarHandleOp VarIsInitializedOp RngReadAndSkip RngSkip
    StatelessRandomGetAlg Print PrintV2 StringFormat
    Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Digamma Elu Erf Erfc Exp Expm1
    Floor Imag Inv Invert IsFinite IsInf IsNan Lgamma Log Log1p LogicalNot Neg Real
    Reciprocal Relu Relu6 LeakyRelu Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Softplus
    Softsign Sqrt Square Tan Tanh Cast Conj
    """.split()
)

# Do not fail if the static shapes of all operands and results are known: these fit, or
# the op would not have been built.
_SHAPED = frozenset(
    """
    Add AddN AddV2 Atan2 BiasAdd BiasAddGrad Complex DivNoNan Equal NotEqual Greater
    GreaterEqual Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mul MulNoNan
    RealDiv SquaredDifference Sub Xdivy Xlogy Bitcast Select SelectV2 ClipByValue
    EluGrad InvGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad
    SigmoidGrad SoftplusGrad SoftsignGrad SqrtGrad TanhGrad
    MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum L2Loss LogSoftmax Softmax
    SoftmaxCrossEntropyWithLogits OneHot Pack Unpack Diag DiagPart EnsureShape
    BroadcastArgs BroadcastGradientArgs ConcatOffset Fill Range Squeeze
    AvgPool AvgPoolGrad AvgPool3D AvgPool3DGrad Conv2D Conv2DBackpropFilter
    Conv2DBackpropInput Conv3D Conv3DBackpropFilterV2 Conv3DBackpropInputV2
    DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter
    DepthwiseConv2dNativeBackpropInput FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3
    FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3 MaxPool MaxPoolGrad
    RandomStandardNormal RandomUniform TruncatedNormal StatelessRandomGetKeyCounter
    StatelessRandomNormal StatelessRandomNormalV2 StatelessRandomUniform
    StatelessRandomUniformV2 StatelessTruncatedNormal StatelessTruncatedNormalV2
    """.split()
)

# Do not fail if, besides, axes, shapes, and places are constant. Computed ones may be
# invalid, even if the result has a known shape.
_PARAMETERIZED = frozenset(
    """
    All Any Max Mean Min Prod Sum EuclideanNorm BroadcastTo ConcatV2 Cumprod Cumsum
    ExpandDims MatrixBandPart MirrorPad MirrorPadGrad Pad PadV2 Reshape ReverseV2 Slice
    Split SplitV StridedSlice StridedSliceGrad Tile Transpose
    """.split()
)
_DIVISIONS = frozenset("Div FloorDiv FloorMod Mod Pow".split())  # integers, by zero

_RANDOM_STATES = frozenset(("RngReadAndSkip", "RngSkip"))


class FailureAnalysis:
    """Tells which ops of one build write and which can fail, with a cache."""

    def __init__(self) -> None:
        self._bodies: dict[tf.Graph, tuple[bool, bool]] = {}
        self._has_static_results: dict[tf.Operation, bool] = {}

    def writes(self, op: tf.Operation) -> bool:
        """Whether an op writes a variable, or may call a function that does.

        States of random generators do not count: the numbers drawn depend on the write.
        """
        kind = kind_of(op)
        if not kind.effect or not kind.resources or op.type in _RANDOM_STATES:
            return False
        if not kind.calls:
            return writes_at(op, 0)
        if not resource_inputs(op):
            return False
        bodies = functions.called_graphs(op)
        if not bodies:
            return bool(touched(op)[1])
        return any(self._inside(body)[0] for _, body in bodies)

    def fails(self, op: tf.Operation) -> bool:
        """Whether an op can fail, or may call a function that can."""
        if op.type in _ALWAYS:
            return False
        if op.type in _SHAPED:
            return not self._shapes_known(op)
        if op.type in _PARAMETERIZED:
            return not self._shapes_known(op) or _has_computed_parameter(op)
        if op.type in _DIVISIONS:
            return not self._shapes_known(op) or op.outputs[0].dtype.is_integer
        kind = kind_of(op)
        if kind.calls:
            bodies = functions.called_graphs(op)
            return not bodies or any(self._inside(body)[1] for _, body in bodies)
        return not (kind.effect and kind.resources and writes_at(op, 0))

    def _inside(self, body: tf.Graph) -> tuple[bool, bool]:
        """Returns whether a function writes variables, and whether it can fail."""
        if body not in self._bodies:
            ops = body.get_operations()
            self._bodies[body] = (
                any(self.writes(op) for op in ops),
                any(self.fails(op) for op in ops),
            )
        return self._bodies[body]

    def _shapes_known(self, op: tf.Operation) -> bool:
        """Whether the static shapes of all operands and results are known."""
        return self._known_results(op) and all(
            self._known_results(tensor.op) for tensor in op.inputs
        )

    def _known_results(self, op: tf.Operation) -> bool:
        all_known = self._has_static_results.get(op)
        if all_known is None:
            all_known = self._has_static_results[op] = all(
                tensor.shape.is_fully_defined() for tensor in op.outputs
            )
        return all_known


def _has_computed_parameter(op: tf.Operation) -> bool:
    """Whether an operand is computed that is an integer, but no data of type T."""
    if not any(t.dtype.is_integer and t.op.type != "Const" for t in op.inputs):
        return False
    types = [
        one.type_attr
        for one in op.op_def.input_arg
        for _ in range(op.get_attr(one.number_attr) if one.number_attr else 1)
    ]
    return any(
        t.op.type != "Const" and t.dtype.is_integer and type_ != "T"
        for t, type_ in zip(op.inputs, types, strict=True)
    )
