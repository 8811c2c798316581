# SPDX-License-Identifier: Apache-2.0
"""What a variable costs in a step, counted one kind of work at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest

from replicator.costs import cost, variable_cost
from replicator.costs.rates import KINDS, Calibration, Rates
from replicator.costs.variable_cost import Load
from tests import paper_hosts

N = 8 * cost._BUCKET_BYTES  # so large that even a quarter of it travels alone
NOTHING = Rates(0.0, 0.0, 0.0, 0.0, 0.0, False)


def _costs(
    on: Sequence[str] = KINDS, apart: bool = False, **rates: float
) -> Calibration:
    """Returns costs of one kind of work or several, on some kinds of devices."""
    own = dataclasses.replace(NOTHING, apart=apart, **rates)
    return Calibration({kind: own if kind in on else NOTHING for kind in KINDS})


def _cpus(count: int) -> list[str]:
    return [f"/device:CPU:{n}" for n in range(count)]


HOSTS = paper_hosts.names((0, 1, 2))  # three, with one replica each


def test_an_update_touches_gradient_variable_and_slots() -> None:
    for slots in (0, 2):
        load = Load(N, slots)
        for devices in (_cpus(1), ["/device:GPU:0"]):
            for seconds in (
                variable_cost.mirrored(load, devices, _costs(add=1.0)),
                variable_cost.owned(load, devices, devices[0], _costs(add=1.0)),
            ):
                assert seconds == (2 + slots) * N
            assert variable_cost.mirrored(load, devices, _costs(op=1.0)) == 2 + slots


def test_rows_that_are_updated_are_those_of_any_replica() -> None:
    load = Load(1000, 0, rows=0.1)
    assert load.travels == 100
    assert [load.update(n).added / 2 for n in (1, 3, 20)] == [100, 300, 1000]
    assert Load(1000, 0, rows=3.0).travels == Load(1000, 0).travels == 1000


def test_each_of_several_updates_what_it_holds() -> None:
    one = variable_cost.mirrored(Load(N), _cpus(1), _costs(add=1.0))
    for count in (2, 4):
        hub = count * N  # the gradients, added up once
        found = variable_cost.mirrored(Load(N), _cpus(count), _costs(add=1.0), "hub")
        assert found == count * one + hub  # on cores that all share
        found = variable_cost.owned(Load(N), _cpus(count), _cpus(1)[0], _costs(add=1.0))
        assert found == one + hub


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("rows", [None, 0.25])
def test_gradients_go_to_the_owner_and_what_is_read_comes_back(
    rows: float | None, copies: bool
) -> None:
    load = Load(N, rows=rows)
    others = len(HOSTS) - 1
    sent = variable_cost.owned(load, HOSTS, HOSTS[1], _costs(link=1.0), copies)
    back = N if copies else load.travels
    assert sent == others * load.travels + others * back
    messages = variable_cost.owned(load, HOSTS, HOSTS[1], _costs(message=1.0), copies)
    assert messages == 2 * others


def test_what_shares_memory_is_read_where_it_is() -> None:
    costs = _costs(link=1.0)
    assert variable_cost.owned(Load(N), _cpus(3), _cpus(1)[0], costs) == 2 * N
    gpus = [f"/device:GPU:{n}" for n in range(3)]
    assert variable_cost.owned(Load(N), gpus, gpus[0], costs) == 4 * N


def test_copies_are_written_on_every_replica() -> None:
    for copies in (False, True):
        found = variable_cost.owned(
            Load(N), _cpus(3), _cpus(1)[0], _costs(copy=1.0), copies=copies
        )
        assert found == 3 * N * copies


def test_small_tensors_pay_their_part_of_a_message() -> None:
    message = variable_cost.mirrored(Load(N), HOSTS, _costs(message=1.0), "hub")
    for part in (0.5, 0.125):
        load = Load(int(part * cost._BUCKET_BYTES))
        found = variable_cost.mirrored(load, HOSTS, _costs(message=1.0), "hub")
        assert found == part * message


def test_the_cheapest_algorithm_is_taken_that_devices_can_use() -> None:
    costs = _costs(link=1.0, message=5.0, apart=True)
    able = ("hub", "shuffled", "tree", "ring")
    named = [variable_cost.mirrored(Load(N), HOSTS, costs, name) for name in able]
    assert variable_cost.mirrored(Load(N), HOSTS, costs) == min(named)
    gpus = [f"/device:GPU:{n}" for n in range(4)]
    unmeasured = Calibration()  # NCCL is used where it was measured
    named = [variable_cost.mirrored(Load(N), gpus, unmeasured, name) for name in able]
    assert variable_cost.mirrored(Load(N), gpus, unmeasured) == min(named)
    nccl = variable_cost.mirrored(Load(N), gpus, costs, "nccl")
    assert variable_cost.mirrored(Load(N), gpus, costs) == nccl


def test_parts_are_reduced_one_after_another_or_at_the_same_time() -> None:
    loads, owners = [Load(N), Load(3 * N)], HOSTS[:2]
    costs = _costs(link=1.0)
    single = [
        variable_cost.owned(load, HOSTS, owner, costs)
        for load, owner in zip(loads, owners, strict=True)
    ]
    assert variable_cost.in_parts(loads, owners, HOSTS, costs) == max(single)
    assert variable_cost.in_parts(loads, [owners[0]] * 2, HOSTS, costs) == sum(single)
    cpus = _cpus(2)
    single = [variable_cost.owned(load, cpus, cpus[0], costs) for load in loads]
    assert variable_cost.in_parts(loads, cpus, cpus, costs) == sum(single)
    everywhere = variable_cost.mirrored(loads[0], HOSTS, costs)
    found = variable_cost.in_parts(loads, ["", owners[1]], HOSTS, costs)
    assert found == everywhere + variable_cost.owned(loads[1], HOSTS, owners[1], costs)


def test_parts_are_joined_and_gradients_split_on_each_replica() -> None:
    for count in (1, 3):
        cpus = _cpus(count)
        found = variable_cost.in_parts(
            [Load(N)] * 2, [cpus[0]] * 2, cpus, _costs(copy=1.0)
        )
        assert found == count * 2 * 2 * N


@pytest.mark.parametrize(
    "seconds",
    [
        lambda load, costs: variable_cost.mirrored(load, HOSTS, costs),
        lambda load, costs: variable_cost.owned(
            load, HOSTS, HOSTS[0], costs, copies=True
        ),
        lambda load, costs: variable_cost.in_parts([load] * 2, HOSTS[:2], HOSTS, costs),
    ],
    ids=["mirrored", "owned", "in parts"],
)
def test_nothing_larger_or_slower_is_cheaper(
    seconds: Callable[[Load, Calibration], float],
) -> None:
    for rows in (None, 0.1):
        sizes = [seconds(Load(n, rows=rows), Calibration()) for n in (0, 10, N, 3 * N)]
        assert sizes == sorted(sizes) and sizes[0] >= 0
    for kind in ("op", "message", "link", "add", "copy"):
        once = seconds(Load(N), _costs(**{kind: 1.0}))
        assert seconds(Load(N), _costs(**{kind: 2.0})) == 2 * once
