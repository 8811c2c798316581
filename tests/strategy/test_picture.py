# SPDX-License-Identifier: Apache-2.0
"""Pictures of strategies: every byte of every variable is drawn where it is placed."""

from __future__ import annotations

import pathlib
import xml.etree.ElementTree

import pytest

import replicator
from replicator import strategy
from replicator.strategy import picture
from replicator.strategy.nodes import Node
from replicator.variables.synchronizer import AllReduceSynchronizer, PSSynchronizer

NAMES = [f"/job:localhost/replica:0/task:0/device:CPU:{k}" for k in range(2)]
FACTS = {"shape": (6, 4), "dtype": "float32"}


def _made() -> strategy.Strategy:
    parts = [PSSynchronizer(NAMES[1]), PSSynchronizer("/job:ps/task:3/device:CPU:0")]
    cut = Node.in_parts("cut", 0, [4, 2], parts)
    nodes = (
        Node("whole", PSSynchronizer(NAMES[0]), **FACTS),
        Node("on all", AllReduceSynchronizer(), **FACTS),
        Node("copied", PSSynchronizer(NAMES[0], local_replication=True), **FACTS),
        Node("cut", None, cut.parts, 0, (4, 2), **FACTS),
        Node("unknown", AllReduceSynchronizer()),
    )
    return strategy.Strategy(nodes, NAMES)


def test_blocks_are_where_the_nodes_say_and_as_large() -> None:
    actual = {(b.name, b.device): b.nbytes for b in picture.blocks(_made())}
    assert actual == {
        ("whole", "CPU:0"): 96,
        ("on all", "CPU:0"): 96,
        ("on all", "CPU:1"): 96,
        ("copied", "CPU:0"): 96,
        ("copied", "CPU:1"): 96,
        ("cut/part_0", "CPU:1"): 64,
        ("cut/part_1", "ps:3 CPU:0"): 32,
        ("unknown", "CPU:0"): 0,
        ("unknown", "CPU:1"): 0,
    }


@pytest.mark.parametrize("made", [_made(), strategy.Strategy()])
def test_it_is_a_picture(made: strategy.Strategy, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "strategy.svg"
    made.plot(path)
    text = "".join(xml.etree.ElementTree.parse(path).getroot().itertext())
    assert made.id in text
    for block in picture.blocks(made):
        assert block.device in text and (block.name in text or not block.nbytes)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "strategy.gif",
            "a strategy cannot be plotted to 'strategy.gif'(.|\n)*png or .svg",
        ),
        (
            "none/strategy.svg",
            "(?s)a strategy cannot be plotted to.*folder that exists",
        ),
    ],
)
def test_where_it_cannot_be_drawn_is_said(path: str, said: str) -> None:
    with pytest.raises(replicator.ArgumentError, match=said):
        _made().plot(path)
