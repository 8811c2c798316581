# SPDX-License-Identifier: Apache-2.0
"""Pictures of plans: nothing is clipped or overlaps, from 1 row to 300."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from replicator import errors
from replicator.plan import Plan
from replicator.report import display, lanes, units
from tests import helpers
from tests.report import examples


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("count", "num_replicas"), [(0, 1), (1, 2), (7, 2), (64, 3), (65, 8), (300, 8)]
)
def test_all_text_is_inside_and_apart(count: int, num_replicas: int) -> None:
    figure = lanes.make_figure(examples.made_up(count, num_replicas))
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts = [text for axes in figure.axes for text in axes.texts]
    boxes = [text.get_window_extent(renderer) for text in texts]
    legend = figure.legends[0].get_window_extent(renderer)
    heading = figure.texts[0].get_window_extent(renderer)
    for box in (*boxes, legend, heading):
        assert box.x0 >= 0 and box.y0 >= 0, box
        assert box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height, box
    strips = [
        [text.get_window_extent(renderer) for text in axes.texts]
        for axes in figure.axes
    ]
    for one, other in itertools.pairwise(strips):
        assert min(box.y0 for box in one) >= max(box.y1 for box in other)
    for boxes in [*strips, [legend, heading]]:
        for one, other in itertools.combinations(boxes, 2):
            assert not one.overlaps(other)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 128, 300, 1000])
def test_strips_hold_all_communications_in_order(count: int) -> None:
    layout = lanes._layout(examples.made_up(count, 2), 5)
    assert [n for strip in layout.strips for n in strip] == list(range(count))
    assert max(map(len, layout.strips)) <= 64
    assert layout.size[0] < 20


def _texts(plan: Plan, folder: pathlib.Path) -> str:
    plan.plot(folder / "plan.svg")
    return (folder / "plan.svg").read_text()


def test_an_svg_names_replicas_communications_and_places(
    tmp_path: pathlib.Path,
) -> None:
    repl = helpers.make(2)
    plan = repl.build(examples.everywhere(repl)).plan
    text = _texts(plan, tmp_path)
    assert "8 communications of 2 replicas, 128 B per step" in text
    for row in plan:
        assert f"{display.title(row)}, {units.size(row.nbytes)}" in text
    for name in ("replica 0, CPU:0", "replica 1, CPU:1", "forward", "backward"):
        assert name in text
    for place in ("loop body (6 times)", "function inner &gt; conditional (true)"):
        assert place in text


def test_a_png_is_one(tmp_path: pathlib.Path) -> None:
    examples.made_up(5, 2).plot(str(tmp_path / "plan.PNG"))
    assert (tmp_path / "plan.PNG").read_bytes().startswith(b"\x89PNG")


def _links(backward: bool) -> Any:
    plan = examples.made_up(30, 3)
    rows = tuple(row for row in plan if row.backward == backward)
    figure = lanes.make_figure(Plan(rows, plan.devices))
    lines = [line for axes in figure.axes for line in axes.lines]
    return {line.get_linestyle() for line in lines[len(plan.devices) :]}


def test_forward_and_backward_are_told_apart() -> None:
    assert _links(backward=False) == {"-"}
    assert _links(backward=True) == {"--"}


def test_who_only_receives_is_hollow() -> None:
    plan = examples.made_up(1, 3)
    (axes,) = lanes.make_figure(plan).axes
    sending, receiving = axes.collections[-2:]
    (row,) = plan
    assert [y for _, y in sending.get_offsets()] == [row.group[0]]
    assert [y for _, y in receiving.get_offsets()] == list(row.group[1:])
    assert receiving.get_facecolor()[0].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("name", ["plan.pdf", "plan", "png"])
def test_another_suffix_is_an_error(name: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.ArgumentError, match="cannot be plotted to") as caught:
        examples.made_up(1, 2).plot(tmp_path / name)
    assert "Fix: name a file that ends in .png or .svg." in str(caught.value)
    assert not list(tmp_path.iterdir())
