# SPDX-License-Identifier: Apache-2.0
"""Types of ops, by what they do to rows of examples.

The results of ops in none of these tables are unknown: losses made of them are refused,
and fetches of them are computed from the whole batch.
"""

from __future__ import annotations

PASSED_ON = frozenset(
    """Identity Cast StopGradient PreventGradient Snapshot CheckNumerics CheckNumericsV2
    EnsureShape PlaceholderWithDefault DebugGradientIdentity DebugIdentityV2
    DeepCopy Bitcast Neg ReadVariableOp""".split()
)
# Element-wise ops, with one operand or several that are broadcast; powers.py has the
# rules for powers of the number of examples.
ELEMENTWISE = frozenset(
    """Abs Acos Acosh Angle Asin Asinh Atan Atan2 Atanh BesselI0 BesselI0e BesselI1
    BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1
    Betainc BitwiseAnd BitwiseOr BitwiseXor Ceil ClipByValue Complex ComplexAbs Conj Cos
    Cosh Dawsn Digamma Elu EluGrad Equal Erf Erfc Erfinv Exp Expint Expm1 Floor FloorDiv
    FloorMod FresnelCos FresnelSin Greater GreaterEqual Igamma IgammaGradA
    Igammac Imag Inv Invert InvGrad IsFinite IsInf IsNan LeakyRelu LeakyReluGrad
    LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr
    Maximum Minimum Mod Ndtri NextAfter NotEqual OnesLike Polygamma
    PopulationCount Pow Real Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad
    RightShift Rint Round Rsqrt RsqrtGrad
    Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softplus SoftplusGrad Softsign
    SoftsignGrad Spence Sqrt SqrtGrad Square SquaredDifference Tan Tanh TanhGrad
    TruncateDiv TruncateMod Xdivy Xlog1py Xlogy ZerosLike Zeta
    StringLower StringUpper StringStrip StringLength StringToNumber AsString Substr
    StringToHashBucketFast StringToHashBucketStrong StringToHashBucket
    StaticRegexFullMatch StaticRegexReplace RegexReplace RegexFullMatch StringJoin
    Bucketize FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars Select SelectV2
    Add AddV2 AddN Sub Mul MulNoNan RealDiv Div DivNoNan AccumulateNV2""".split()
)
# Ops that replace each element by a number or a vector of them, on axes behind.
REPLACED = frozenset({"DecodeRaw", "LookupTableFind", "LookupTableFindV2"})
QUANTIZED = frozenset({f"QuantizeAndDequantizeV{k}" for k in (2, 3, 4)})
COMPARISONS = frozenset({"Less", "LessEqual", "Greater", "GreaterEqual"})
ADDED = frozenset({"Add", "AddV2", "AddN", "Sub", "AccumulateNV2"})
TIMES = frozenset({"Mul", "MulNoNan"})
OVER = frozenset({"RealDiv", "Div", "DivNoNan"})
# Ops of one operand: the factor by which they multiply its exponent.
HOMOGENEOUS = {
    **dict.fromkeys(("Abs", "Relu", "LeakyRelu", "ComplexAbs", "Real", "Imag"), 1.0),
    **{"Conj": 1.0, "Square": 2.0, "Sqrt": 0.5, "Rsqrt": -0.5},
    **dict.fromkeys(("Reciprocal", "Inv"), -1.0),
    **dict.fromkeys(("Sign", "ZerosLike", "OnesLike", "IsNan", "IsFinite"), 0.0),
}
# Ops of operands with equal exponents: the factor by which they multiply it.
ALIKE = {
    **dict.fromkeys(("Maximum", "Minimum"), 1),
    **dict.fromkeys(("Less", "LessEqual", "Greater", "GreaterEqual"), 0),
    **{"Equal": 0, "NotEqual": 0, "SquaredDifference": 2},
}
# Gradients of element-wise ops: the index of the operand they are a multiple of.
MULTIPLES = {
    **{"TanhGrad": 1, "SigmoidGrad": 1, "ReluGrad": 0, "LeakyReluGrad": 0},
    **{"EluGrad": 0, "SeluGrad": 0, "SoftplusGrad": 0, "SoftsignGrad": 0},
    **{"RsqrtGrad": 1, "SqrtGrad": 1, "ReciprocalGrad": 1, "Relu6Grad": 0},
}
REDUCED = frozenset({"Mean", "Sum", "Max", "Min", "All", "Any", "Prod"})
# Ops that treat the rows of the first axis alike, and have no other operands with rows.
FIRST_AXIS = frozenset(
    """Conv2D Conv3D DepthwiseConv2dNative MaxPool MaxPoolV2 MaxPool3D AvgPool AvgPool3D
    BiasAdd LRN ResizeBilinear ResizeNearestNeighbor ResizeBicubic ResizeArea
    ExtractImagePatches ExtractVolumePatches Dilation2D DepthToSpace SpaceToDepth
    RGBToHSV HSVToRGB AdjustContrastv2 AdjustHue AdjustSaturation MaxPoolGrad
    AvgPoolGrad MaxPoolGradGrad MaxPoolGradV2 MaxPoolGradGradV2 LRNGrad
    ResizeBilinearGrad ResizeNearestNeighborGrad ResizeBicubicGrad
    InTopK InTopKV2 CropAndResizeGradImage SparseSoftmaxCrossEntropyWithLogits
    SoftmaxCrossEntropyWithLogits AvgPool3DGrad MaxPool3DGrad
    ImageProjectiveTransformV2 ImageProjectiveTransformV3 DrawBoundingBoxesV2
    """.split()
)
# Ops on the last axis or axes: the number of these.
LAST_AXES = {
    **dict.fromkeys(("Softmax", "LogSoftmax", "TopKV2", "TopK", "FFT", "IFFT"), 1),
    **dict.fromkeys(("RFFT", "IRFFT", "NthElement", "MatrixDiagV3", "MatrixDiag"), 1),
    **dict.fromkeys(("Cholesky", "MatrixInverse", "MatrixDeterminant", "Qr"), 2),
    **dict.fromkeys(("LogMatrixDeterminant", "SelfAdjointEigV2", "Svd"), 2),
    **dict.fromkeys(("MatrixDiagPartV3", "MatrixDiagPart", "MatrixDiagPartV2"), 2),
    **dict.fromkeys(("MatrixSetDiagV3", "MatrixSolve", "MatrixTriangularSolve"), 2),
    **dict.fromkeys(("FFT2D", "IFFT2D", "MatrixSquareRoot", "MatrixBandPart"), 2),
}
ALONG = frozenset({"Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2", "Roll"})
CHOSEN = frozenset({"ArgMax", "ArgMin"})
NORMALIZED = frozenset({"FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"})
# Ops that are given their result's shape: the index of that operand.
SHAPED = {
    **{"Fill": 0, "RandomUniform": 0, "RandomStandardNormal": 0, "TruncatedNormal": 0},
    **{"RandomUniformInt": 0, "StatelessRandomUniform": 0, "StatelessRandomNormal": 0},
    **{"StatelessTruncatedNormal": 0, "StatelessRandomUniformInt": 0},
    **{"StatelessRandomUniformV2": 0, "StatelessRandomNormalV2": 0},
    **{"StatelessTruncatedNormalV2": 0, "StatelessRandomUniformIntV2": 0},
    **{"RandomGamma": 0, "StatefulUniform": 2, "StatefulStandardNormalV2": 2},
    **{"StatefulTruncatedNormal": 2, "StatefulUniformInt": 2},
    **{"BroadcastTo": 1, "Empty": 0},
}
# Python functions: they are trusted to treat rows one by one.
BELIEVED = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
