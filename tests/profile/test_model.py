# SPDX-License-Identifier: Apache-2.0
"""Predictions equal closed forms, and start from the measured values."""

from __future__ import annotations

import dataclasses
import math

import pytest

from replicator.costs import rates
from replicator.primitives import table
from replicator.profile import model
from tests.profile import made

_BYTES = 4 << 20  # of made.row()
_LINK, _MESSAGE = 1e-9, 1e-5
_NETWORK = rates.Rates(0.0, _MESSAGE, _LINK, 0.0, 0.0, True)
_CALIBRATION = rates.Calibration()


@pytest.mark.parametrize("replicas", [2, 3, 8, 64])
def test_a_hub_on_a_network_has_the_speed_up_of_the_inequality(replicas):
    ring = made.row(algorithm="ring")
    measurement = made.measured((ring,), (0.05,))
    step = model.on_several_hosts(measurement, replicas, _CALIBRATION, _NETWORK)
    # The minimum over all algorithms, each in closed form.
    r, steps = replicas, math.ceil(math.log2(replicas))
    expected = min(
        2 * (r - 1) * (_MESSAGE + _BYTES * _LINK),  # hub
        2 * (r - 1) * (_MESSAGE + _BYTES / r * _LINK),  # shuffled, ring
        2 * steps * (_MESSAGE + _BYTES * _LINK),  # tree
    )
    assert step.sync == pytest.approx(expected)
    assert step.step == pytest.approx(measurement.alone + expected)
    ratio = expected / measurement.alone
    assert step.speed_up == pytest.approx(r / (1 + ratio))
    assert step.pays == (ratio < r - 1) == (step.speed_up > 1)


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_what_was_measured_is_predicted_of_itself(replicas):
    rows = made.row(group=tuple(range(replicas))), made.row("permute", number=1)
    if replicas == 1:
        rows = ()
    parts = (0.05, 0.02)[: len(rows)]
    measurement = made.measured(rows, parts, replicas=replicas)
    predicted = model.on_these_devices(measurement, replicas, _CALIBRATION)
    step = measurement.alone if replicas == 1 else measurement.step
    assert predicted.step == pytest.approx(step)
    assert (
        model.on_these_devices(measurement, 1, _CALIBRATION).step == measurement.alone
    )


@pytest.mark.parametrize(
    ("facts", "steps"),
    [
        # Each replica's 0.2 s of work fill both cores for 0.1 s; nothing is lost.
        ({}, {1: 0.11, 2: 0.21, 4: 0.41, 64: 6.41}),
        # One thread each: no core is shared until there are more of them.
        (
            {"compute": 0.1, "alone": 0.1, "work": 0.1, "fixed": 0.0, "cores": 4},
            {2: 0.1, 4: 0.1, 8: 0.2},
        ),
        # What sharing was measured to lose is lost with more replicas.
        ({"compute": 0.3}, {4: 0.61}),
        # What one does for all does not grow.
        ({"once": 0.05}, {2: 0.26, 3: 0.36, 8: 0.86, 64: 6.46}),
        # Devices of their own compute at the same time.
        ({"cores": None, "compute": 0.12}, {8: 0.13}),
    ],
    ids=["busy", "threads", "lost", "once", "apart"],
)
def test_steps_are_as_by_hand(facts, steps):
    measurement = made.measured(**facts)
    for replicas, step in steps.items():
        predicted = model.on_these_devices(measurement, replicas, _CALIBRATION)
        assert predicted.step == pytest.approx(step)


@pytest.mark.parametrize("cores", [1, 2, 4, 16])
def test_fewer_replicas_than_were_measured_are_between_them_and_one(cores):
    measurement = made.measured(
        replicas=4, cores=cores, compute=0.5, once=0.05, alone=0.15, work=0.2
    )
    steps = [
        model.on_these_devices(measurement, r, _CALIBRATION).step for r in range(1, 5)
    ]
    assert steps[0] == measurement.alone and steps[3] == pytest.approx(measurement.step)
    assert steps == sorted(steps)


@pytest.mark.parametrize("replicas", [2, 3, 8, 64])
def test_one_replica_alone_tells_of_more(replicas):
    rows = made.row(algorithm="factors, hub", group=(0,)), made.row(group=(0,))
    measurement = made.measured(
        *(rows, (0.02, 0.001)),
        **{"replicas": 1, "cores": 4, "once": 0.04, "compute": 0.03, "fixed": 0.009},
        alone=0.1,
        work=0.3,
    )
    cpu = _CALIBRATION.of("cpu")
    sums = cpu.op + 2 * (replicas - 1) * cpu.message + replicas * _BYTES * cpu.add
    # 0.091 s keep 0.3 / 0.091 of 4 cores busy; products cover all replicas' rows.
    least = max(0.091, replicas * 0.3 / 4)
    most = replicas * 0.3 / 4 + 3 / 4 * 0.091
    waits = 0.02 * replicas + 0.001 + sums
    seconds = [0.009 + 0.04 + 0.03 * each / 0.091 + waits for each in (least, most)]
    step = model.on_these_devices(measurement, replicas, _CALIBRATION)
    assert step.low == pytest.approx(seconds[0])
    assert step.step == pytest.approx((seconds[0] + seconds[1]) / 2)
    assert step.high == pytest.approx(max(step.step, 0.1 * replicas + waits))


@pytest.mark.parametrize("found", [1, 2, 4])
@pytest.mark.parametrize("cores", [1, 2, 16, None])
@pytest.mark.parametrize("busy", [0.5, 1.0])
def test_steps_of_more_replicas_are_longer_and_between_their_bounds(found, cores, busy):
    facts = made.measured(
        *((made.row(group=tuple(range(found))),), (0.02,)),
        **{"replicas": found, "cores": cores, "once": 0.03 if cores else 0.0},
        **{"busy": busy if cores else 1.0, "spread": 0.1},
        compute=0.07 * found,
    )
    steps = [model.on_these_devices(facts, r, _CALIBRATION) for r in range(1, 65)]
    steps += [
        model.on_several_hosts(facts, r, _CALIBRATION, _NETWORK) for r in range(1, 65)
    ]
    for some in (steps[:64], steps[64:]):
        times = [prediction.step for prediction in some]
        assert cores is None or times == sorted(times) or found == 1
    for own in steps:
        assert 0 < own.low * 1.0999 < own.step < own.high / 1.0999


def test_bounds_are_cores_that_are_never_idle_and_whole_steps_one_after_another():
    measurement = made.measured(compute=0.2, once=0.05, busy=0.8)
    prediction = model.on_these_devices(measurement, 6, _CALIBRATION)
    assert prediction.step == pytest.approx(0.01 + 0.05 + 0.6)
    assert prediction.low == pytest.approx(0.26 + 0.8 * 0.4)
    assert prediction.high == pytest.approx(3 * 0.26)
    wider = model.on_these_devices(
        dataclasses.replace(measurement, spread=0.25), 6, _CALIBRATION
    )
    assert wider.step == prediction.step
    assert (wider.low, wider.high) == pytest.approx(
        (prediction.low / 1.25, prediction.high * 1.25)
    )


@pytest.mark.parametrize(("replicas", "name"), [(1, "alone"), (2, "step")])
def test_what_was_measured_is_bounded_by_how_it_varied(replicas, name):
    measurement = made.measured(busy=0.3, spread=0.2)
    own = model.on_these_devices(measurement, replicas, _CALIBRATION)
    seconds = getattr(measurement, name)
    assert (own.low, own.high) == pytest.approx((seconds / 1.2, seconds * 1.2))


def test_hosts_hide_the_shorter_of_computing_and_communication_at_best():
    measurement = made.measured((made.row(algorithm="ring"),), (0.05,))
    for link in (1e-10, 1e-7):
        network = dataclasses.replace(_NETWORK, link=link)
        prediction = model.on_several_hosts(measurement, 8, _CALIBRATION, network)
        assert prediction.low == max(measurement.alone, prediction.sync)
        assert (
            prediction.high
            == prediction.step
            == pytest.approx(measurement.alone + prediction.sync)
        )


def test_a_hub_on_shared_cores_grows_as_its_work():
    measurement = made.measured((made.row(),), (0.05,))
    without = made.measured()
    steps = [
        model.on_these_devices(measurement, r, _CALIBRATION).step
        - model.on_these_devices(without, r, _CALIBRATION).step
        for r in (2, 4)
    ]
    cpu = _CALIBRATION.of("cpu")
    works = [cpu.op + 2 * (r - 1) * cpu.message + r * _BYTES * cpu.add for r in (2, 4)]
    assert steps == pytest.approx([0.05, 0.05 * works[1] / works[0]])


def test_groups_keep_their_sizes():
    pair = made.row(group=(0, 1))
    measurement = made.measured((pair,), (0.05,), replicas=4)
    more = made.measured((), (), replicas=4)
    extra = (
        model.on_these_devices(measurement, 8, _CALIBRATION).step
        - model.on_these_devices(more, 8, _CALIBRATION).step
    )
    assert extra == pytest.approx(0.1)  # twice as many groups on the same cores
    network = [
        model.on_several_hosts(measurement, r, _CALIBRATION, _NETWORK).sync
        for r in (4, 64)
    ]
    assert network[0] == network[1] > 0


@pytest.mark.parametrize("name", sorted(set(table.PRIMITIVES) - {"send", "recv"}))
@pytest.mark.parametrize("kind", rates.KINDS)
def test_each_primitive_costs_more_among_more_replicas(name, kind):
    row = made.row(name)
    times = [model.modelled(row, r, kind, _CALIBRATION) for r in (1, 2, 4, 64)]
    assert times[0] == 0 < times[1]
    if name == "permute" and _CALIBRATION.of(kind).apart:
        assert times[1] == times[3]  # each sends to one
    else:
        assert times == sorted(times)


def test_a_faster_network_is_never_slower_and_latency_counts():
    measurement = made.measured(
        (made.row(), made.row("broadcast", number=1)), (0.1, 0.1)
    )
    fast = dataclasses.replace(_NETWORK, link=_LINK / 10)
    late = dataclasses.replace(_NETWORK, message=1e-2)
    for replicas in (2, 16):
        steps = [
            model.on_several_hosts(measurement, replicas, _CALIBRATION, network).step
            for network in (fast, _NETWORK, late)
        ]
        assert steps == sorted(set(steps))


@pytest.mark.parametrize("replicas", [2, 8, 64])
def test_a_communication_sends_a_message_however_small_it_is(replicas):
    """Among hosts, two messages are a loss's least, one after the other."""
    least = 2 * math.ceil(math.log2(replicas)) * _MESSAGE
    loss = made.row(shape=())
    found = made.measured((loss,), (0.001,))
    sync = model.on_several_hosts(found, replicas, _CALIBRATION, _NETWORK).sync
    assert sync == pytest.approx(least, rel=1e-2)
    # Small tensors of one communication share the message; others have their own.
    ten = dataclasses.replace(loss, operands=(loss.operands[0] * 10,) * 2)
    for rows, times in (((ten,), 1), ((loss,) * 3, 3)):
        found = made.measured(rows, (0.001,) * len(rows))
        sync = model.on_several_hosts(found, replicas, _CALIBRATION, _NETWORK).sync
        assert sync == pytest.approx(times * least, rel=2e-2)
    for name in ("barrier", "broadcast", "message"):
        row = dataclasses.replace(made.row(name), operands=((),) * 2)
        assert model.modelled(row, 2, "hosts", _CALIBRATION) > 1e-4


def test_verdicts_say_where_it_stops():
    def steps(*times):
        return [model.Predicted(n, t, 1.0) for n, t in enumerate(times, 1)]

    assert model.verdict(steps(1, 1.5, 2, 4.5, 6)) == model.Verdict(3, 1.5, 4, 2)
    assert model.verdict(steps(1, 3, 4)) == model.Verdict(1, 1.0, 2, None)
    assert model.verdict(steps(1, 1, 1)) == model.Verdict(3, 3.0, None, 2)
