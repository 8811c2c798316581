# SPDX-License-Identifier: Apache-2.0
"""The networks as numbers, independent of any framework: sizes, examples and labels.

Each of the three perceptrons stresses something else: the small one the overhead of a
step that computes next to nothing, the large one memory traffic (10 million
parameters), the deep one the number of ops and of variables. The residual network adds
convolutions and batch normalization, the language model a loop, the wide and deep model
a variable of which each step touches only some rows.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sysconfig
from typing import Any

import numpy as np

CLASSES = 10
LEARNING_RATE = 1e-3
MOMENTUM = 0.9

# (examples, labels): one array or several, [batch, ...]; int32 [batch, ...]
Batch = tuple[Any, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Perceptron:
    """A perceptron with `layers` hidden layers of `hidden` rectified linear units."""

    inputs: int
    hidden: int
    layers: int

    @property
    def sizes(self) -> list[int]:
        """The width of each layer, from the inputs to the logits."""
        return [self.inputs, *[self.hidden] * self.layers, CLASSES]

    def batch(self, size: int) -> Batch:
        """Returns `size` random examples, the same in each call."""
        return _random((self.inputs,), size)


@dataclasses.dataclass(frozen=True)
class ResNet:
    """The residual network for small images with 6n + 2 layers.

    Source: He et al. 2015, arXiv:1512.03385, section 4.2.
    """

    n: int
    image: tuple[int, int, int] = (32, 32, 3)
    filters: tuple[int, ...] = (16, 32, 64)

    def batch(self, size: int) -> Batch:
        """Returns `size` random images, the same in each call."""
        return _random(self.image, size)


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """Predicts each character of Python's standard library from the preceding ones.

    Each character becomes an embedding of `units` numbers, the input of LSTM layers.
    """

    units: int
    layers: int
    length: int
    characters: int = 128

    def batch(self, size: int) -> Batch:
        """Returns `size` lines of text, the same in each call on one Python.

        Returns:
            int32 [size, length] twice: the characters, and the character after each.
        """
        text = standard_library()
        starts = np.random.default_rng(0).integers(0, len(text) - self.length, size)
        lines = np.stack([text[s : s + self.length + 1] for s in starts])
        return lines[:, :-1], lines[:, 1:]


@dataclasses.dataclass(frozen=True)
class WideAndDeep:
    """Predicts a click from categorical features, and from some numeric ones.

    Source: Cheng et al. 2016, Wide & Deep Learning for Recommender Systems,
    arXiv:1606.07792. The wide part is linear in the same features.
    """

    rows: int
    columns: int
    hidden: tuple[int, ...] = (256, 128)
    features: int = 26  # 26 categorical and 13 numeric, as in the Criteo data sets
    values: int = 13

    def batch(self, size: int) -> Batch:
        """Returns `size` random examples, the same in each call.

        Returns:
            (int32 [size, features], float32 [size, values]), int32 [size]. A few
            features are frequent, most are rare.
        """
        rng = np.random.default_rng(0)
        often = rng.zipf(1.2, (size, self.features))
        scattered = often * 2_654_435_761  # Knuth's hash: scatters neighbours
        numbers = (scattered % self.rows).astype(np.int32)
        values = rng.standard_normal((size, self.values), np.float32)
        return (numbers, values), rng.integers(0, 2, size, np.int32)


SMALL = Perceptron(32, 64, 2)
LARGE = Perceptron(1024, 2048, 3)
DEEP = Perceptron(64, 64, 100)
RESNET20 = ResNet(3)
LANGUAGE = LanguageModel(256, 2, 32)
CLICKS = WideAndDeep(1_000_000, 64)


def _random(shape: tuple[int, ...], size: int) -> Batch:
    rng = np.random.default_rng(0)
    examples = rng.standard_normal((size, *shape), np.float32)
    return examples, rng.integers(0, CLASSES, size, np.int32)


@functools.cache
def standard_library(limit: int = 1 << 20) -> np.ndarray:
    """Returns the start of the text of the installed Python's own modules.

    Args:
        limit: The maximum number of characters.

    Returns:
        int32 [characters]; non-ASCII characters become question marks.

    Raises:
        FileNotFoundError: This Python was installed without its source.
    """
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    parts, total = [], 0
    for path in sorted(folder.glob("*.py")):
        parts.append(path.read_text("utf-8", "replace").encode("ascii", "replace"))
        total += len(parts[-1])
        if total >= limit:
            break
    if not parts:
        raise FileNotFoundError(f"{folder} holds no .py files to learn from")
    text = np.frombuffer(b"".join(parts)[:limit], np.uint8)
    return text.astype(np.int32)
