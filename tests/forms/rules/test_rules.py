# SPDX-License-Identifier: Apache-2.0
"""The law of each rule: replicas compute of their parts what one device computes.

The samples are in the files of this folder. laws.py has the law.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import tensorflow as tf

from tests.forms import laws
from tests.forms.laws import Sample
from tests.forms.rules import (
    examples,
    products,
    rows,
    slices,
    test_control_flow,
    test_elementwise,
    test_lists,
    test_lookups,
    test_normalization,
    test_random,
    test_recurrent,
    test_reductions,
    test_shapes,
)

v1 = tf.compat.v1


@dataclasses.dataclass(frozen=True)
class Table:
    """Samples of a rule's types, and where they are checked.

    Attributes:
        name: Of the test.
        samples: The samples.
        replicas: The number of replicas.
        rows: The numbers of rows; fewer than replicas: some have none.
        has_plan: Whether no op may be computed of gathered inputs, and each has the
            form that its sample says.
        grads: Whether those of all are checked, or of none; None: as the samples say.
        slow: Whether it is no test of the gate.
    """

    name: str
    samples: Sequence[Sample]
    replicas: int = 2
    rows: tuple[int, ...] = (5, 2, 1)
    has_plan: bool = True
    grads: bool | None = None
    slow: bool = False


def _programs(programs: Sequence[Any]) -> list[Sample]:
    return [Sample(one.__name__, one) for one in programs]


def _derivatives(programs: Sequence[Any]) -> list[Sample]:
    twice = test_control_flow.twice
    return [Sample(one.__name__, twice(one), grads=False) for one in programs]


LOOPS, BRANCHES = test_control_flow.LOOPS, test_control_flow.BRANCHES
QUICK = [test_control_flow.looped, test_control_flow.branched]
ELEMENTWISE, SUMS = test_elementwise.SAMPLES, test_elementwise.SUMS
LISTS = [*test_lists.SAMPLES, *test_lists.OTHERS]
RANDOM = [*test_random.STATELESS, *test_random.OTHERS]
OF_MOMENTS, SHORT = test_normalization.SAMPLES, (5, 1)
# Gradients of element-wise ops are such ops, too, but for those of broadcasting. Some
# kernels take no empty batches: those of oneDNN, and of mirrors.
TABLES = [
    Table("elementwise", ELEMENTWISE, 3),
    Table("elementwise", ELEMENTWISE, 2, SHORT, grads=True, slow=True),
    Table("sums", SUMS, 2, SHORT),
    Table("sums", SUMS, 3, (5, 2), slow=True),
    Table("products", products.SAMPLES, 3),
    Table("products", products.SAMPLES, 2, SHORT, slow=True),
    Table("examples", examples.SAMPLES, 2, (5, 2), grads=False),
    Table("examples", examples.SAMPLES, 3, (4, 3), slow=True),
    Table("recurrent", test_recurrent.SAMPLES, 2, (5, 2)),
    Table("reductions", test_reductions.SAMPLES, 2, SHORT),
    Table("reductions", test_reductions.SAMPLES, 3, (5, 2), slow=True),
    Table("normalization", OF_MOMENTS, 3, SHORT),
    Table("normalization", OF_MOMENTS, 2, SHORT, slow=True),
    Table("rows", rows.SAMPLES, 2, SHORT, grads=False),
    Table("rows", rows.SAMPLES, 3, (5, 2), slow=True),
    Table("shapes", test_shapes.SAMPLES, 2),
    Table("shapes", test_shapes.SAMPLES, 3, slow=True),
    Table("shapes among others", test_shapes.OTHERS, 2, has_plan=False),
    Table("slices", slices.SAMPLES, 2),
    Table("slices", slices.SAMPLES, 3, slow=True),
    Table("slices among others", slices.OTHERS, 2, has_plan=False),
    Table("mirrors", slices.MIRRORED, 2, (5, 2)),
    Table("lookups", test_lookups.SAMPLES, 2),
    Table("lookups", test_lookups.SAMPLES, 3, slow=True),
    Table("lookups among others", test_lookups.OTHERS, 2, has_plan=False),
    Table("forms of lists", test_lists.SAMPLES, 2, ()),
    Table("lists", LISTS, 2, has_plan=False),
    Table("lists", LISTS, 3, has_plan=False, slow=True),
    Table("forms of random", test_random.STATELESS, 2, ()),
    Table("random", RANDOM, 2, (7, 2, 1), has_plan=False),
    Table("random", RANDOM, 3, (7, 2, 1), has_plan=False, slow=True),
    Table("loops", _programs(LOOPS), 2, SHORT, has_plan=False),
    Table("branches", _programs(BRANCHES), 2, SHORT, has_plan=False),
    Table("second derivatives", _derivatives(QUICK), 2, (3, 1), has_plan=False),
    Table("of loops", _derivatives(LOOPS), 2, (3, 1), has_plan=False, slow=True),
    Table("of branches", _derivatives(BRANCHES), 2, (3, 1), has_plan=False, slow=True),
]


def _cases() -> Iterator[Any]:
    for table in TABLES:
        marks = pytest.mark.slow if table.slow else ()
        yield pytest.param(table, id=f"{table.name}-{table.replicas}", marks=marks)


@pytest.mark.parametrize("table", list(_cases()))
def test_law(table: Table) -> None:
    samples = table.samples
    if table.grads is not None:
        samples = [dataclasses.replace(s, grads=table.grads) for s in samples]
    law = laws.Law(samples, table.replicas)
    if table.has_plan:
        law.check_plan()
    for count in table.rows:
        law.check(count)


@pytest.fixture
def dimensions() -> Iterator[None]:
    """Sizes are TensorFlow 1's Dimensions: unknown ones are unequal to nothing."""
    v1.disable_v2_tensorshape()
    yield
    v1.enable_v2_tensorshape()


# Programs of TensorFlow 1 make ops of the first three most often.
@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([*test_shapes.SAMPLES, *test_shapes.OTHERS], id="shapes"),
        pytest.param(test_reductions.SAMPLES, id="reductions"),
        pytest.param([*slices.SAMPLES, *slices.OTHERS], id="slices"),
        pytest.param(ELEMENTWISE, id="elementwise", marks=pytest.mark.slow),
        pytest.param(
            [*test_lookups.SAMPLES, *test_lookups.OTHERS],
            id="lookups",
            marks=pytest.mark.slow,
        ),
        pytest.param(rows.SAMPLES, id="rows", marks=pytest.mark.slow),
        pytest.param(OF_MOMENTS, id="normalization", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("dimensions")
def test_law_of_dimensions(samples: Sequence[Sample]) -> None:
    law = laws.Law([dataclasses.replace(s, grads=False) for s in samples], 2)
    for count in (5, 1):
        law.check(count)


# With types that are sampled elsewhere: variables and tables in test_state.py, random
# numbers in test_random.py. An optional value that is missing is never read. Some
# kernels are only for GPUs, or only built by passes of TensorFlow (oneDNN).
DRAWN = " ".join(test_random.DRAWN)
NOT_SAMPLED = """
    Conv2DBackpropFilterV2 Conv2DBackpropInputV2 MaxPoolGradGradWithArgmax
    Conv3DBackpropFilter Conv3DBackpropFilterV2
    Conv3DBackpropInput Conv3DBackpropInputV2 CudnnRNN CudnnRNNV2 CudnnRNNV3
    CudnnRNNBackprop CudnnRNNBackpropV2 CudnnRNNBackpropV3
"""
EXAMPLES = [*products.SAMPLES, *examples.SAMPLES, *test_recurrent.SAMPLES]
LOOKED_UP = "ResourceGather ResourceGatherNd LookupTableFindV2"


SAMPLED: dict[str, tuple[Sequence[Sample], str]] = {
    "elementwise": (ELEMENTWISE, "Assert"),
    "products": (EXAMPLES, NOT_SAMPLED),
    "reductions": (test_reductions.SAMPLES, ""),
    "normalization": (OF_MOMENTS, ""),
    "rows": (rows.SAMPLES, ""),
    "shapes": (test_shapes.SAMPLES, DRAWN),
    "slices": ([*slices.SAMPLES, *slices.MIRRORED], ""),
    "lookups": (test_lookups.SAMPLES, LOOKED_UP),
    "lists": (LISTS, "OptionalNone"),
    "random": (test_random.STATELESS, DRAWN),
}


@pytest.mark.parametrize("room", SAMPLED)
def test_each_type_has_a_sample(room: str) -> None:
    samples, without = SAMPLED[room]
    module = importlib.import_module(f"replicator.forms.rules.{room}")
    assert not laws.missing(module, samples, without)
