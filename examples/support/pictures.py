# SPDX-License-Identifier: Apache-2.0
"""Images as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import image
from matplotlib.figure import Figure


def tile(images: np.ndarray, columns: int) -> np.ndarray:
    """Returns images of one size, tiled.

    Args:
        images: [n, height, width, 1], within 0 to 1.
        columns: The number of images in a row; blanks fill the last row.

    Returns:
        [rows * height, columns * width], within 0 to 1.
    """
    count, height, width, _ = images.shape
    rows = -(-count // columns)
    filled = np.pad(images[..., 0], [(0, rows * columns - count), (0, 0), (0, 0)])
    grid = filled.reshape(rows, columns, height, width).transpose(0, 2, 1, 3)
    return grid.reshape(rows * height, columns * width)


def save_grid(images: np.ndarray, columns: int, path: Path, scale: int = 2) -> None:
    """Writes tiled images, with each pixel enlarged to a square."""
    grid = tile(np.clip(images, 0, 1), columns)
    image.imsave(path, grid.repeat(scale, 0).repeat(scale, 1), cmap="gray", vmax=1)


def save_images(
    images: np.ndarray, titles: Sequence[str], path: Path, columns: int = 8
) -> None:
    """Writes images with a title each; a note if there are none.

    Args:
        images: [n, height, width, 1].
        titles: One per image.
        path: The path of the PNG file.
        columns: The number of images in a row.
    """
    rows = max(1, -(-len(images) // columns))
    figure = Figure(figsize=(1.1 * columns, 1.4 * rows), layout="constrained")
    if not len(images):
        figure.text(0.5, 0.5, "none", ha="center")
    for axes in np.ravel(figure.subplots(rows, columns)):
        axes.set_axis_off()
    for axes, pixels, title in zip(figure.axes, images, titles, strict=False):
        axes.imshow(pixels[..., 0], cmap="gray")
        axes.set_title(title, fontsize=8)
    figure.savefig(path, dpi=120)
