# SPDX-License-Identifier: Apache-2.0
"""Pictures of graphs show the contents of the sketch."""

from __future__ import annotations

import pathlib
import xml.etree.ElementTree

import pytest

from replicator.stages import drawing
from replicator.stages.sketch import Block, Sketch

BLOCKS = tuple(Block(f"CPU:{k}", f"layer<{k}>", k + 1, k) for k in range(3))


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_it_is_a_picture(ending: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / f"graph.{ending}"
    drawing.draw(Sketch(BLOCKS, ((0, 1, 2), (2, 0, 9))), "A & B", path)
    if ending == "svg":
        text = "".join(xml.etree.ElementTree.parse(path).getroot().itertext())
        for block in BLOCKS:
            assert block.device in text and block.scope in text
        assert "A & B" in text and "2 calls" in text
    else:
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("count", [0, 1, 500])
def test_it_stays_of_a_size_that_can_be_looked_at(count: int) -> None:
    blocks = tuple(Block("CPU:0", f"scope{n}", 1) for n in range(count))
    links = ((0, count - 1, 1),) if count > 1 else ()
    width, height = drawing.make_figure(Sketch(blocks, links), "").get_size_inches()
    assert 1 < width < 10 and 0.5 < height < 40
