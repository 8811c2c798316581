# SPDX-License-Identifier: Apache-2.0
"""Ops that treat each row along some axes alone, as softmax and sorting do."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator.forms.equations import by_axes
from replicator.forms.forms import Fact, Sharded
from replicator.forms.rule import OpPlan, of_rows, of_sums, plan, rule
from replicator.forms.sizes import axes_of, ints

# How many of the last axes of each input are taken together: 1 of a vector, 2 of a
# matrix. Further inputs are the same for all rows. The axes before are those of the
# outputs, too.
_TYPES: dict[tuple[int, ...], str] = {
    (1,): """
        AdjustHue AdjustSaturation FFT HSVToRGB IFFT IRFFT IsotonicRegression LogSoftmax
        MatrixDiag NthElement RFFT RGBToHSV Softmax TopKV2
    """,
    (2,): """
        Cholesky Eig FFT2D IFFT2D IRFFT2D LogMatrixDeterminant Lu MatrixBandPart
        MatrixDeterminant MatrixDiagPart MatrixInverse MatrixLogarithm MatrixSquareRoot
        Qr RFFT2D SelfAdjointEigV2 Svd
    """,
    (3,): "AdjustContrastv2 FFT3D IFFT3D IRFFT3D RFFT3D",
    (1, 1): "Cross LowerBound UpperBound",
    (2, 1): "MatrixSetDiag",
    (2, 2): """
        CholeskyGrad MatrixSolve MatrixSolveLs
        MatrixTriangularSolve TridiagonalSolve
    """,
    (2, 2, 2, 2): "TridiagonalMatMul",
}
_LAST = {name: inner for inner, names in _TYPES.items() for name in names.split()}


@rule(" ".join(_LAST))
def last_axes(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """The rule of ops that treat each vector, or matrix, of the last axes alone."""
    return _of_last(op, facts, _LAST[op.type])


def _of_last(
    op: tf.Operation, facts: list[Fact], inner: tuple[int, ...]
) -> OpPlan | None:
    terms = ["..." + "0123"[:count] for count in inner]
    more = len(facts) - len(inner)
    return by_axes(op, facts, ",".join(terms + [""] * more) + "->...")


@rule(
    "MatrixDiagV2 MatrixDiagV3 MatrixDiagPartV2 MatrixDiagPartV3 MatrixSetDiagV2 "
    "MatrixSetDiagV3"
)
def diagonals(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """The rule of one diagonal of each matrix; several of them are a matrix, too."""
    inner = _LAST[op.type[:-2]]
    which = ints(facts[len(inner)])
    is_one = which is not None and len(set(which)) == 1
    return _of_last(op, facts, inner) if is_one else None


@of_rows("Cumsum ReverseV2 Roll")
@of_rows("Cumprod CumulativeLogsumexp ArgMax ArgMin", linear=False)
def along_axes(op: tf.Operation, form: Sharded, facts: list[Fact]) -> OpPlan | None:
    """The rule of ops with a list of axes as their last input."""
    axes = axes_of(op, facts[-1])
    if axes is None or form.axis in axes:
        return None
    is_gone = op.type in ("ArgMax", "ArgMin") and axes[0] < form.axis
    return plan(op, [form], form.at(form.axis - is_gone))


@rule("ReverseSequence")
def reverse_sequence(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """The rule of ReverseSequence: a number per row says how much of it is reversed."""
    names = [*"abcdefgh"[: op.inputs[0].shape.rank]]
    names[op.get_attr("seq_dim")] = "0"
    term, batch = "".join(names), names[op.get_attr("batch_dim")]
    return of_sums(op, facts) or by_axes(op, facts, f"{term},{batch}->{term}")


@of_rows("OneHot", linear=False)
def one_hot(op: tf.Operation, form: Sharded, facts: list[Fact]) -> OpPlan | None:
    """The rule of OneHot, which adds an axis."""
    axis = op.get_attr("axis")
    return plan(op, [form], form.at(form.axis + (0 <= axis <= form.axis)))
