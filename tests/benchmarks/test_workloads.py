# SPDX-License-Identifier: Apache-2.0
"""All contenders compute the same; one that computes something else is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from benchmarks import allreduce, at_work, build, contenders, networks, workloads

_NAMES = {w.name: w for w in workloads.WORKLOADS}
_TINY = {
    "small": networks.Perceptron(4, 4, 1),
    "resnet20": networks.ResNet(1, (8, 8, 3), (4, 8)),
    "lstm": networks.LanguageModel(8, 2, 6),
    "wide": networks.WideAndDeep(500, 4, (8,)),
}
_OPTIONS = pytest.mark.parametrize(
    "options", contenders.OPTIONS.values(), ids=contenders.OPTIONS
)


def _tiny(name: str) -> workloads.Workload:
    return dataclasses.replace(_NAMES[name], network=_TINY[name], batch=8)


@pytest.mark.parametrize("name", _TINY)
def test_parts_are_the_batch_which_is_always_the_same(name: str) -> None:
    workload = _tiny(name)
    (examples, labels), parts = workload.network.batch(8), workload.parts(2)
    assert [len(part[1]) for part in parts] == [4, 4]
    np.testing.assert_array_equal(np.concatenate([p[1] for p in parts]), labels)
    if not isinstance(examples, tuple):
        joined = np.concatenate([p[0] for p in parts])
        np.testing.assert_array_equal(joined, examples)
        return
    for k, leaf in enumerate(examples):
        np.testing.assert_array_equal(np.concatenate([p[0][k] for p in parts]), leaf)


@pytest.mark.battery(5)
@_OPTIONS
@pytest.mark.parametrize("name", _TINY)
def test_replicas_compute_what_one_device_does(
    name: str, options: dict[str, Any]
) -> None:
    workload = _tiny(name)
    weights = contenders.initial_weights(workload)
    one = contenders.one_device(workload, 2, weights)
    ours = contenders.replicated(workload, 2, weights, **options)
    losses = [(float(one()), float(ours())) for _ in range(3)]
    assert losses[2][0] < losses[0][0]  # each step uses the previous update
    if workload.batch_norm:  # replicas normalize by their own examples
        assert losses[2][1] < losses[0][1]
    else:
        np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-4)


def test_only_the_rows_of_the_step_are_read_and_written() -> None:
    workload = _tiny("wide")
    step = contenders.one_device(workload, 1, contenders.initial_weights(workload))
    ops = step.get_concrete_function().graph.get_operations()
    whole = [t.shape for op in ops for t in op.outputs if 500 in t.shape.as_list()]
    assert not whole
    assert sum(op.type == "ResourceScatterSub" for op in ops) == 2


@_OPTIONS
def test_the_parts_of_a_build_make_the_whole(options: dict[str, Any]) -> None:
    built = build.build_replicated(_tiny("small"), 2, **options)
    assert built.step_fn > 0 and built.passes > 0 and built.first_run > 0
    assert built.step_fn + built.passes < built.trace
    assert built.total == built.trace + built.first_run


@pytest.mark.parametrize(
    ("program", "makers", "said"),
    [
        (allreduce, (allreduce.added, allreduce.replicated), "sum of 64"),
        (at_work, (at_work.one_device, at_work.replicated), "maximum"),
    ],
    ids=["allreduce", "at_work"],
)
def test_a_wrong_result_ends_the_program(program: Any, makers: Any, said: str) -> None:
    values = allreduce.operands(64, 2)
    for make in makers:
        program.checked(make(values), values, "x")(1)
    wrong = makers[0]([values[0], values[0]])
    with pytest.raises(SystemExit, match=f"error: some name gives a wrong {said}"):
        program.checked(wrong, values, "some name")
