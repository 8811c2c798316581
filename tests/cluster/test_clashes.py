# SPDX-License-Identifier: Apache-2.0
"""Places at which processes can never meet; tests/between tests their errors."""

from __future__ import annotations

import itertools
import threading

import pytest
import tensorflow as tf

import replicator
from replicator._tf import cluster
from replicator.cluster import clashes


def _now(kind: str, place: tuple[int, int], which: int = 0) -> clashes._Activity:
    return clashes._Activity(kind, which, f"{kind} f at train.py:1", 0.0, place)


def _never_meet(one: clashes._Activity, other: clashes._Activity) -> bool:
    return other.place in clashes._rivals(one) and clashes._clash(one, other)


def test_a_step_and_the_talk_in_place_of_it_never_meet() -> None:
    # Both had sent 3 objects and begun 5 steps.
    runs, waits = _now(clashes._STEP, (3, 6)), _now(clashes._TALK, (4, 5))
    assert _never_meet(runs, waits) and _never_meet(waits, runs)


def test_two_steps_at_one_place_never_meet() -> None:
    one, other = (_now(clashes._STEP, (3, 6), k) for k in (1, 2))
    assert _never_meet(one, other) and not _never_meet(one, one)


def test_a_process_that_is_ahead_is_waited_for() -> None:
    """Whatever one does, the others may reach it as long as they are behind."""
    kinds = (clashes._STEP, clashes._TALK)
    for one, other in itertools.product(kinds, kinds):
        behind = _now(one, (4, 5))
        for place in ((4, 6), (5, 5), (5, 6)):
            ahead = _now(other, place)
            if (one, other, place) != (clashes._TALK, clashes._STEP, (3, 6)):
                assert not _never_meet(behind, ahead), (behind, ahead)
                assert not _never_meet(ahead, behind), (behind, ahead)


class _Store:
    """The store of the first process, and the ends of the collectives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: dict[str, str] = {}
        self.ended: list[str] = []
        self._change = threading.Condition()
        monkeypatch.setattr(cluster, "store_put", self._put)
        monkeypatch.setattr(cluster, "store_delete", self.values.__delitem__)
        monkeypatch.setattr(cluster, "store_get", self.get)
        monkeypatch.setattr(cluster, "abort_collectives", self.ended.append)

    def _put(self, key: str, value: str) -> None:
        with self._change:
            self.values[key] = value
            self._change.notify_all()

    def get(self, key: str, seconds: float) -> str | None:
        with self._change:
            self._change.wait_for(lambda: key in self.values, seconds)
            return self.values.get(key)


def test_who_finds_a_clash_waits_until_the_others_have_found_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its end would look like the loss of a host to those that look later."""
    monkeypatch.setattr(clashes, "_GRACE", 60.0)
    store = _Store(monkeypatch)
    one, other = (clashes.ActivityMonitor(k, ["host 0", "host 1"]) for k in (0, 1))
    with one.running(7, "runs f"), other.running(8, "runs g"):
        assert one._activity is not None and other._activity is not None
        other._look(other._activity)
        finder = threading.Thread(target=one._look, args=(one._activity,), daemon=True)
        finder.start()
        store.get(clashes._found_key(0), 60.0)
        assert not store.ended
        other._look(other._activity)
        finder.join(60.0)
    assert len(store.ended) == 2
    for doing in (one, other):
        with pytest.raises(replicator.MismatchError):
            doing.check()


def test_a_clash_explains_the_end_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clashes, "_GRACE", 0.0)
    _Store(monkeypatch)
    one, other = (clashes.ActivityMonitor(k, ["host 0", "host 1"]) for k in (0, 1))
    end = tf.errors.UnavailableError(None, None, "connection reset")
    with pytest.raises(tf.errors.UnavailableError), other.waiting("builds g"):
        raise end
    with one.running(7, "runs f"):
        assert one._activity is not None
        one._look(one._activity)
        other.next_number()
        with pytest.raises(replicator.MismatchError), other.waiting("builds g"):
            assert other._activity is not None
            other._look(other._activity)
            raise end


def test_both_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clashes, "_GRACE", 0.0)
    store = _Store(monkeypatch)
    names = ["host 0 (a:1)", "host 1 (b:2)"]
    one, other = (clashes.ActivityMonitor(k, names) for k in (0, 1))
    for doing in (one, other):
        assert doing.next_number() == 0
    with one.running(7, "runs f at train.py:1"):
        assert other.next_number() == 1
        with other.waiting("builds g at train.py:2"):
            assert one._activity is not None and other._activity is not None
            one._look(one._activity)
            one.check()  # nobody has sent anything else yet
            other._look(other._activity)
            one._look(one._activity)
    assert store.ended
    for doing, first, second in ((one, 0, 1), (other, 1, 0)):
        with pytest.raises(replicator.MismatchError) as caught:
            doing.check()
        lines = str(caught.value).splitlines()
        assert "would wait for one another forever" in lines[0]
        activities = ("host 0 (a:1): runs f at", "host 1 (b:2): builds g at")
        assert activities[first] in lines[1] and activities[second] in lines[2]


def test_steps_of_all_are_told_apart() -> None:
    def gather(size: int, key: int) -> int | None:
        @tf.function
        def step() -> tf.Tensor:
            return tf.raw_ops.CollectiveGatherV2(
                input=[1],
                group_size=size,
                group_key=1,
                instance_key=key,
                ordering_token=[],
            )

        return clashes.key_of_all(step.get_concrete_function(), 3)

    assert gather(3, 17) == 17
    assert gather(2, 17) is None, "of some"
