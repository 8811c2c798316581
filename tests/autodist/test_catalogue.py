# SPDX-License-Identifier: Apache-2.0
"""All programs of sessions and functions compute on replicas what one device does."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import tensorflow as tf

from tests.autodist import functions, helpers
from tests.autodist.catalogue import FUNCTIONS, SESSIONS


def _cases(programs: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the names of programs, each with all of its ways."""
    for name, program in programs.items():
        for way in program.ways():
            words = [name, *(str(part).partition("(")[0] for part in way)]
            title = "-".join(words).replace(", ", "-").replace(" ", "_")
            yield pytest.param(name, *way, id=title)


@functools.cache
def _in_a_plain_session(name: str) -> Any:
    with tf.Graph().as_default():
        return SESSIONS[name].run(helpers.plain_session)


@pytest.mark.parametrize(
    "name, replicas, plan",
    list(_cases(SESSIONS)),
)
@pytest.mark.filterwarnings("ignore:loss= of:DeprecationWarning")
def test_sessions(name: str, replicas: int, plan: Any) -> None:
    program, autodist = SESSIONS[name], helpers.make(replicas, plan)
    with tf.Graph().as_default(), autodist.scope():
        found = program.run(autodist.create_distributed_session)
    expected = program.expected or _in_a_plain_session(name)
    helpers.assert_equal(found, expected)


@functools.cache
def _on_one_device(name: str) -> Any:
    return FUNCTIONS[name].one_device()


@pytest.mark.parametrize(
    "name, door, replicas, plan",
    list(_cases(FUNCTIONS)),
)
def test_functions(name: str, door: str, replicas: int, plan: Any) -> None:
    program = FUNCTIONS[name]
    by = functools.partial(functions.DOORS[door], program, replicas=replicas, plan=plan)
    found = program.run(lambda make: by(make=make))
    helpers.assert_equal(found, _on_one_device(name), 1e-4)
