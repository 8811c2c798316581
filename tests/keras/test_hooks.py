# SPDX-License-Identifier: Apache-2.0
"""Methods of one object that are temporarily replaced."""

from __future__ import annotations

import pytest

from replicator.keras import hooks


class _Greeter:
    def greet(self, name: str) -> str:
        return f"hello {name}"


def test_only_the_object_and_only_in_the_block() -> None:
    one, other = _Greeter(), _Greeter()
    method = _Greeter.greet
    with hooks.replaced(one, "greet", lambda name: f"bye {name}"):
        assert one.greet("you") == "bye you"
        assert other.greet("you") == "hello you"
        assert _Greeter.greet is method
    assert one.greet("you") == "hello you"
    assert "greet" not in vars(one)


def test_blocks_nest_and_errors_leave_nothing_behind() -> None:
    one = _Greeter()
    with pytest.raises(KeyError), hooks.replaced(one, "greet", lambda _: "outer"):
        with pytest.raises(ValueError), hooks.replaced(one, "greet", lambda _: "inner"):
            assert one.greet("you") == "inner"
            raise ValueError
        assert one.greet("you") == "outer"
        raise KeyError
    assert one.greet("you") == "hello you" and not vars(one)


def test_what_the_object_had_of_its_own_comes_back() -> None:
    one = _Greeter()
    own = lambda name: f"own {name}"  # noqa: E731
    one.greet = own  # type: ignore[method-assign]
    with hooks.replaced(one, "greet", lambda _: "another"):
        assert one.greet("you") == "another"
    assert vars(one)["greet"] is own
