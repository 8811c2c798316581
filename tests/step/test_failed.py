# SPDX-License-Identifier: Apache-2.0
"""What an assertion of ours says is all that the error of an eager step says."""

from __future__ import annotations

import pytest
import tensorflow as tf

from replicator.step import failed

_PLACES = "Graph execution error:\n\nDetected at node Assert defined at ...\n"


def _error(text: str) -> tf.errors.OpError:
    return tf.errors.InvalidArgumentError(None, None, _PLACES + text)


def test_the_pieces_of_an_assertion_become_a_message() -> None:
    error = failed.in_short(
        _error(
            "assertion failed: [all_reduce: it is wrong.] [replica 0: at train.py:4] "
            "[shapes on replicas 0, 1, 2:] [2 3] [] [-1] [Fix: don\\'t.]\n\t [[{{node "
            "communicate/Assert}}]] [Op:__inference_traced_1]"
        )
    )
    assert type(error) is tf.errors.InvalidArgumentError
    assert str(error) == (
        "all_reduce: it is wrong.\n  replica 0: at train.py:4\n"
        "  shapes on replicas 0, 1, 2: [2, 3] [] [-1]\nFix: don't."
    )


@pytest.mark.parametrize(
    "text", ["assertion failed: [of the user] [3]", "ConcatOp : Dimensions differ"]
)
def test_other_errors_stay_what_they_are(text: str) -> None:
    error = _error(text)
    assert failed.in_short(error) is error
