# SPDX-License-Identifier: Apache-2.0
"""Whether processes end their inputs together is agreed on, or found step by step."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator.inputs import agreed_ends
from tests.cluster import as_threads


@pytest.mark.parametrize(
    ("lengths", "ask"),
    [
        ((3, 3), False),
        ((-1, -1), False),  # both never end
        ((3, 4), True),
        ((3, -1), True),
        ((None, None), True),  # only reading tells
        ((3, None), True),
    ],
)
def test_steps_ask_unless_all_end_together(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[Any, Any], ask: bool
) -> None:
    as_threads.fake_store(monkeypatch)
    found = as_threads.together(
        *(lambda p, n=length: agreed_ends.agree(p, n) for length in lengths)
    )
    if not ask:
        assert found == [None, None]
        return
    one, other = (end._keys for end in found)
    assert one == other and one["group_size"] == 2


def test_both_ask_under_one_key_whatever_they_took_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_threads.fake_store(monkeypatch)

    def agree(peers: Any) -> tuple[int, int]:
        peers.keys.take(0, 5 * peers.process)
        end = agreed_ends.agree(peers, None)
        assert end is not None
        return end._keys["instance_key"], peers.keys.next

    one, other = as_threads.together(agree, agree)
    assert one == other
    assert one[1] == 6  # the sixth key of a range of their own


def test_a_process_that_is_alone_reads_all_rounds_and_no_part_of_one() -> None:
    """Of two replicas, the second has fewer elements."""
    end = agreed_ends.AgreedEnd(1, 7_000_001, 7_000_001)
    iterators = [iter(tf.data.Dataset.range(n)) for n in (3, 2)]

    @tf.function
    def take() -> list[tf.Tensor]:
        return end.elements([it.get_next_as_optional for it in iterators])

    assert [[int(x) for x in take()] for _ in range(2)] == [[0, 0], [1, 1]]
    with pytest.raises(tf.errors.OutOfRangeError):
        take()


@pytest.mark.parametrize("always", [(True, True), (True, False), (False, False)])
def test_steps_ask_where_elements_may_differ(
    monkeypatch: pytest.MonkeyPatch, always: tuple[bool, bool]
) -> None:
    as_threads.fake_store(monkeypatch)

    def agree(compares: bool) -> Any:
        return lambda own: agreed_ends.agree(
            own, -1, agreed_ends.ComparedElements(own.process, "train.py:3", compares)
        )

    found = as_threads.together(*map(agree, always))
    assert [end is None for end in found] == [not any(always)] * 2


def test_digests_tell_elements_apart() -> None:
    elements = [
        tf.zeros([300, 7]),
        tf.zeros([7, 300]) + 1.0,
        tf.constant(True),
        tf.zeros([0]),
        tf.constant([b"ab", b"c"]),
        tf.constant([b"a", b"bc"]),
        tf.ragged.constant([[1], [2, 3]]),
        tf.sparse.from_dense([0.0, 2.0]),
        (tf.constant(1), {"x": tf.constant(2)}),
        (tf.constant(2), {"x": tf.constant(1)}),
    ]
    one, again = (
        [tuple(agreed_ends._digest(element).numpy()) for element in elements]
        for _ in range(2)
    )
    assert one == again
    assert len(set(one)) == len(elements)


def test_a_difference_names_the_hosts_and_the_line() -> None:
    compared = agreed_ends.ComparedElements(0, "train.py:3", True)
    end = agreed_ends.AgreedEnd(2, 7_000_002, 7_000_002, compared)
    facts = tf.constant([[1, 1, 5, 6], [1, 0, 7, 8]])
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        end._fail(facts)
    for part in ("train.py:3", "host 0 read 78", "host 1 read 56", "Fix: let the "):
        assert part in str(caught.value)


def test_padding_is_refused() -> None:
    with pytest.raises(replicator.InputError, match=r'(?s)remainder="pad".*Fix: pass'):
        agreed_ends.refuse_padding()
