# SPDX-License-Identifier: Apache-2.0
"""The device that computes a communication."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import tensorflow as tf

from replicator.costs import cost, rates
from replicator.costs import hosts as places
from tests import paper_hosts

POLICY = cost.Policy()


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [("float32", (3, 4), 48), ("float16", (), 2), ("float64", (0, 9), 0)],
)
def test_bytes_of_a_tensor(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    assert cost.tensor_bytes(tf.zeros(shape, dtype)) == nbytes


@pytest.mark.parametrize("shape", [None, [None, 1000]], ids=str)
def test_an_unknown_size_is_guessed_the_same_for_all(shape: object) -> None:
    with tf.Graph().as_default():
        tensor = tf.compat.v1.placeholder(tf.float32, shape)
        other = tf.compat.v1.placeholder(tf.int64, None)
        assert cost.tensor_bytes(tensor) == cost.tensor_bytes(other) > 0


def test_strings_have_some_size() -> None:
    assert cost.tensor_bytes(tf.constant(["a", "b"])) > 0


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_hubs_share_the_bytes(num_devices: int) -> None:
    devices = [f"/device:CPU:{d}" for d in range(num_devices)]
    hubs = cost.Hubs(devices)
    load = dict.fromkeys(devices, 0)
    sizes = [100 + 7 * k for k in range(80)]
    for size in sizes:
        load[hubs.next(size)] += size
    assert max(load.values()) - min(load.values()) <= max(sizes)


def test_hubs_share_even_empty_tensors() -> None:
    hubs = cost.Hubs(["a", "b", "c"])
    assert [hubs.next(0) for _ in range(6)] == ["a", "b", "c"] * 2


@pytest.mark.parametrize("layout", paper_hosts.LAYOUTS, ids=str)
def test_hubs_share_the_links_of_hosts(layout: tuple[int, ...]) -> None:
    """However many devices a host has, it is a hub as often as the others."""
    hubs = cost.Hubs(paper_hosts.names(layout))
    chosen = [hubs.next(100) for _ in range(12 * len(set(layout)))]
    on_host = Counter(places.host_of(device) for device in chosen)
    assert set(on_host.values()) == {12}
    of_first = Counter(d for d in chosen if places.host_of(d).endswith("task:0"))
    assert max(of_first.values()) - min(of_first.values()) <= 1
    assert len(of_first) == layout.count(0)


@pytest.mark.parametrize("sizes", [[10] * 7, [40_000, 1, 20_000, 1, 9_000], [], [0, 0]])
def test_buckets_hold_each_tensor_once_and_stay_small(sizes: list[int]) -> None:
    columns = [[tf.zeros([size])] * 2 for size in sizes]
    buckets = cost.buckets(columns, POLICY)
    assert sorted(k for bucket in buckets for k in bucket) == list(range(len(sizes)))
    for bucket in buckets:
        assert bucket == sorted(bucket)
        assert len(bucket) == 1 or sum(4 * sizes[k] for k in bucket) <= 120_000


SMALL, HALF = tf.TensorSpec([5]), tf.TensorSpec([5], tf.float16)
TOGETHER: dict[str, tuple[list[tf.TensorSpec], cost.Policy, list[list[int]]]] = {
    "of one dtype": ([SMALL, HALF, SMALL, HALF], POLICY, [[0, 2], [1, 3]]),
    "of like rows": (
        [tf.TensorSpec(s) for s in ([5, 3], [2, 3], [5, 4], [3], [], [0, 3])],
        POLICY,
        [[0, 1, 5], [2], [3, 4]],
    ),
    "alone": ([SMALL, SMALL], cost.Policy(fusion=False), [[0], [1]]),
}


@pytest.mark.parametrize("what", TOGETHER)
def test_which_tensors_share_a_bucket(what: str) -> None:
    specs, policy, expected = TOGETHER[what]
    columns = [[tf.zeros(spec.shape, spec.dtype)] * 2 for spec in specs]
    assert cost.buckets(columns, policy) == expected


def test_a_tensor_of_unknown_size_has_a_bucket_of_its_own() -> None:
    with tf.Graph().as_default():
        static = tf.zeros([5])
        unknown = tf.compat.v1.placeholder(tf.float32, [None])
        columns = [
            [static, static],
            [static, unknown],
            [unknown, static],
            [static, static],
        ]
        assert cost.buckets(columns, POLICY) == [[0, 3], [1], [2]]


# --- The choice of an algorithm -------------------------------------------------------

ALL = cost.ALGORITHM_NAMES
GPUS = [f"/job:localhost/replica:0/task:0/device:GPU:{n}" for n in range(8)]
CPUS = [f"/job:localhost/replica:0/task:0/device:CPU:{n}" for n in range(8)]
HOSTS = [f"/job:worker/replica:0/task:{n}/device:CPU:0" for n in range(8)]


def _with(**costs: float) -> cost.Policy:
    free = {"op": 0.0, "message": 0.0, "link": 0.0, "add": 0.0, "copy": 0.0}
    own = rates.Rates(**(free | costs), apart=True)
    return cost.Policy(calibration=rates.Calibration(dict.fromkeys(rates.KINDS, own)))


@pytest.mark.parametrize("asked", ALL)
def test_what_is_asked_for_is_done_if_it_can_be(asked: str) -> None:
    assert cost.choose(POLICY, asked, ALL, 100, CPUS) == asked
    assert cost.choose(POLICY, asked, ["hub"], 100, CPUS) == "hub"


@pytest.mark.parametrize("nbytes", [None, 0, 1 << 10, 1 << 20, 1 << 26])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_where_cores_are_shared_the_hub_does_the_least(
    count: int, nbytes: int | None
) -> None:
    """Shuffled and ring copy, and a tree adds in several passes."""
    assert cost.choose(POLICY, None, ALL, nbytes, CPUS[:count]) == "hub"


def test_one_device_has_nothing_to_choose() -> None:
    assert cost.choose(POLICY, "ring", ALL, 100, CPUS[:1]) == "hub"


@pytest.mark.parametrize("devices", [GPUS, HOSTS], ids=["gpus", "hosts"])
def test_between_devices_apart_large_tensors_are_cut_up(devices: list[str]) -> None:
    assert cost.choose(POLICY, None, ALL, 1 << 26, devices) in ("shuffled", "ring")


def test_nccl_is_only_for_gpus_that_were_measured() -> None:
    measured = _with(link=1e-9, message=1e-6)
    assert cost.choose(measured, None, ALL, 1 << 26, GPUS) == "nccl"
    assert cost.choose(measured, None, ALL, 1 << 26, [GPUS[0], CPUS[0]]) != "nccl"
    assert cost.choose(measured, None, ALL, 1 << 26, HOSTS) != "nccl"
    assert cost.choose(POLICY, None, ALL, 1 << 26, GPUS) != "nccl"


def test_the_cheapest_by_what_costs() -> None:
    able = ["hub", "shuffled", "tree", "ring"]
    # In a tree, the longest chain has 2 * 3 messages of 8 replicas; elsewhere 14.
    assert cost.choose(_with(message=1), None, able, 1 << 20, CPUS) == "tree"
    assert cost.choose(_with(add=1), None, able, 1 << 20, CPUS) == "shuffled"
    assert cost.choose(_with(), None, able, 1 << 20, CPUS) == "hub"


@pytest.mark.parametrize(
    ("devices", "kind"), [(CPUS, "cpu"), (GPUS, "gpu"), (HOSTS, "hosts")], ids=str
)
def test_kinds_of_devices(devices: list[str], kind: str) -> None:
    assert rates.kind_of(devices) == kind


@pytest.mark.parametrize("rows", [1, 120, 130, 240])
def test_between_hosts_factors_must_be_smaller_than_two_products(rows: int) -> None:
    """A host receives the rows of all others, or at most two products."""
    side = SimpleNamespace(width=1000, rows=rows, tensor=tf.zeros([rows, 1000]))
    products = [SimpleNamespace(left=side, right=side)] * 8
    assert cost.factors_pay(products, POLICY, CPUS)
    received, two_products = 8 * rows * (1000 + 1000), 2 * 1000 * 1000
    assert cost.factors_pay(products, POLICY, HOSTS) is (received < two_products)
