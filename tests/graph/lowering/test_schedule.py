# SPDX-License-Identifier: Apache-2.0
"""The duration of communication between hosts, against times computed by hand."""

from __future__ import annotations

import pathlib

import pytest
import tensorflow as tf

from replicator.costs import rates
from replicator.plan import Plan
from tests import helpers, paper_hosts

MESSAGE, BYTE = 1e-3, 1e-8
FREE = rates.Rates(0.0, 0.0, 0.0, 0.0, 0.0, False)
WIRE = rates.Rates(0.0, MESSAGE, BYTE, 0.0, 0.0, True)


@pytest.fixture(autouse=True)
def _only_links_cost(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rates.json"
    path.write_text(rates.Calibration({"cpu": FREE, "hosts": WIRE}).to_json())
    monkeypatch.setenv(rates.VARIABLE, str(path))


def _plan(layout: tuple[int, ...], algorithm: str, size: int) -> Plan:
    """Returns the plan of an all_reduce."""
    repl = paper_hosts.make(layout, algorithm=algorithm)
    with tf.Graph().as_default():
        repl.run(lambda: repl.all_reduce(helpers.opaque(tf.ones([size]))))
    return repl.plan


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("size", [16 * 24, 1 << 16])
@pytest.mark.parametrize("algorithm", ["hub", "shuffled", "ring"])
def test_messages_of_a_link_follow_one_another(
    algorithm: str, size: int, count: int
) -> None:
    """2 * (hosts - 1) messages, of all bytes, or of a slice."""
    plan = _plan(tuple(range(count)), algorithm, size)
    part = size if algorithm == "hub" else -(-size // (16 * count)) * 16
    message = MESSAGE + 4 * part * BYTE
    expected = 2 * (count - 1) * message
    # First come, first served: when all send to all, some wait for a busy link.
    most = 1.6 if algorithm == "shuffled" else 1.0
    assert plan.seconds is not None
    assert 0.98 * expected <= plan.seconds <= 1.02 * most * expected


@pytest.mark.parametrize(("count", "steps"), [(2, 1), (4, 2), (8, 3), (64, 6)])
def test_a_tree_has_as_many_steps_as_halvings(count: int, steps: int) -> None:
    plan = _plan(tuple(range(count)), "tree", 100)
    # A leader sends to one after the other, the farthest first.
    assert plan.seconds == pytest.approx(2 * steps * (MESSAGE + 400 * BYTE))


def test_what_stays_on_a_host_is_not_on_the_wire() -> None:
    two, four = (_plan(layout, "hub", 100) for layout in ((0, 1), (0, 0, 1, 1)))
    assert two.seconds == four.seconds == pytest.approx(2 * (MESSAGE + 400 * BYTE))
    assert _plan((0, 0, 0), "hub", 100).seconds is None


def test_the_slowest_link_is_named() -> None:
    plan = _plan((0, 1, 2, 2), "tree", 100)
    slowest = plan.slowest_link
    assert slowest is not None
    assert slowest.messages == 1 and slowest.nbytes == 400
    assert slowest.seconds == pytest.approx(MESSAGE + 400 * BYTE)
