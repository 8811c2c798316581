# SPDX-License-Identifier: Apache-2.0
"""The examples of all networks: repeatable, in range, of the right shapes."""

import numpy as np
import pytest

from benchmarks import networks

SMALL_CLICKS = networks.WideAndDeep(1000, 4)


@pytest.mark.parametrize(
    ("network", "shapes", "labels"),
    [
        (networks.SMALL, [(6, 32)], (6,)),
        (networks.RESNET20, [(6, 32, 32, 3)], (6,)),
        (networks.LANGUAGE, [(6, 32)], (6, 32)),
        (SMALL_CLICKS, [(6, 26), (6, 13)], (6,)),
    ],
)
def test_batches_are_repeatable_and_of_the_right_shapes(network, shapes, labels):
    examples, expected = network.batch(6)
    again = network.batch(6)
    leaves = examples if isinstance(examples, tuple) else (examples,)
    assert [leaf.shape for leaf in leaves] == shapes
    assert expected.shape == labels and expected.dtype == np.int32
    np.testing.assert_array_equal(expected, again[1])
    assert (np.diff(leaves[0].reshape(6, -1), axis=0) != 0).any(axis=1).all()


def test_the_text_is_python_and_what_follows_each_character():
    text = bytes(networks.standard_library().astype(np.uint8)).decode("ascii")
    assert len(text) == 1 << 20
    assert text.count("def ") > 100 and text.count("import ") > 100
    examples, labels = networks.LANGUAGE.batch(4)
    np.testing.assert_array_equal(examples[:, 1:], labels[:, :-1])
    line = "".join(map(chr, examples[0])) + chr(labels[0, -1])
    assert line in text
    assert examples.max() < networks.LANGUAGE.characters


def test_a_python_without_source_is_told_of(monkeypatch, tmp_path):
    monkeypatch.setattr(
        networks.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)}
    )
    with pytest.raises(FileNotFoundError, match="holds no .py files"):
        networks.standard_library(7)


def test_a_few_features_are_seen_often_and_most_are_rare():
    (numbers, _), _ = networks.CLICKS.batch(256)
    assert numbers.min() >= 0 and numbers.max() < networks.CLICKS.rows
    counts = np.sort(np.unique(numbers, return_counts=True)[1])
    assert counts[-1] > 0.05 * numbers.size  # the most frequent feature
    assert (counts == 1).mean() > 0.5
