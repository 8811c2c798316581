# SPDX-License-Identifier: Apache-2.0
"""What a session cannot fetch is refused, and how to fetch it is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from replicator import errors
from tests.autodist import helpers

v1 = tf.compat.v1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (lambda w: w.handle, r"handle of .*weight.*Fix: fetch the variable itself"),
        (lambda w: tf.ragged.constant([[1], []]), r"Fix: fetch given\.to_tensor\(\)"),
        (lambda w: "no_such:0", r"cannot fetch .*no_such.*Fix: fetch tensors"),
    ],
)
def test_what_has_no_value_is_refused(given: Callable[[Any], Any], says: str) -> None:
    autodist = helpers.make(2)
    with tf.Graph().as_default(), autodist.scope():
        weight = v1.get_variable("weight", initializer=1.0)
        fetch = given(weight)
        session = autodist.create_distributed_session()
        with pytest.raises(errors.ArgumentError, match=rf"(?s)session\.run.*{says}"):
            session.run(fetch)
        assert session.run([weight, "weight/Read/ReadVariableOp:0"]) == [1.0, 1.0]
