# SPDX-License-Identifier: Apache-2.0
"""All programs of the catalogue, in all ways."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers
from tests.programs import catalogue, runner, ways
from tests.programs import program as p


@pytest.mark.parametrize(("program", "way"), ways.cases(catalogue.ALL))
def test_program(program: p.Program, way: ways.Way) -> None:
    runner.check(program, way)


@pytest.mark.parametrize("name", ["conv_trained_by_adam", "dense_trained_by_adam"])
def test_two_runs_are_bitwise_equal(name: str) -> None:
    program = catalogue.PROGRAMS[name]
    runs = (runner.outcome(program, "eager", helpers.make(4)) for _ in range(2))
    # Keras numbers the names of variables on, by which nests are sorted.
    one, two = ([results, list(held.values())] for results, held in runs)
    for a, b in zip(*map(tf.nest.flatten, (one, two)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_each_two_values_of_options_meet_in_a_way() -> None:
    rows = [
        {"mode": w.mode, "replicas": w.replicas, "together": w.together}
        | dict(w.options)
        for w in ways.WAYS
    ]
    assert {row["mode"] for row in rows} == set(helpers.MODES)
    for one, two in itertools.combinations(rows[0], 2):
        met = {(row[one], row[two]) for row in rows}
        values = itertools.product(
            *({row[name] for row in rows} for name in (one, two))
        )
        assert met | {("session", True)} >= set(values), (one, two)
