# SPDX-License-Identifier: Apache-2.0
"""Random strategies, drawn by Hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from replicator.strategy import AllReduceSynchronizer, Node, PSSynchronizer, Strategy

_NAMES = st.text(
    st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12
)  # representable in UTF-8
_COMPRESSORS = st.sampled_from(["", "bf16", "powersgd(rank=4)"])


@st.composite
def _servers(draw: st.DrawFn) -> PSSynchronizer:
    sync = draw(st.booleans())
    staleness = draw(st.integers(0, 9)) if sync else 0
    return PSSynchronizer(
        draw(_NAMES), draw(st.booleans()), sync, staleness, draw(_COMPRESSORS)
    )


SYNCHRONIZERS = st.one_of(
    _servers(),
    st.builds(
        AllReduceSynchronizer,
        st.sampled_from(["AUTO", "NCCL", "RING"]),
        _COMPRESSORS,
        st.integers(0, 2**31 - 1),
    ),
)


@st.composite
def nodes(draw: st.DrawFn, name: str) -> Node:
    """Draws a node, whole or in parts."""
    is_known = draw(st.booleans())
    facts = {}
    if is_known:
        facts = {
            "shape": tuple(draw(st.lists(st.integers(0, 9), max_size=3))),
            "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
            "sent": draw(st.none() | st.integers(0, 2**62)),
            "seconds": draw(st.none() | st.floats(0, 9)),
        }
    if draw(st.booleans()):
        return Node(name, draw(SYNCHRONIZERS), **facts)
    count = draw(st.integers(2, 4))
    sizes = draw(
        st.just([]) | st.lists(st.integers(1, 99), min_size=count, max_size=count)
    )
    parts = tuple(Node(draw(_NAMES), draw(SYNCHRONIZERS)) for _ in range(count))
    axis = draw(st.integers(0, 3))
    return Node(name, parts=parts, axis=axis, sizes=tuple(sizes), **facts)


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    """Draws a strategy."""
    names = draw(st.lists(_NAMES, unique=True, max_size=4))
    result = tuple(draw(nodes(name)) for name in names)
    return Strategy(result, tuple(draw(st.lists(_NAMES, max_size=3))))
