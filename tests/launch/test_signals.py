# SPDX-License-Identifier: Apache-2.0
"""Signals end the launcher, but for those that are ignored."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from replicator.launch.signals import Signals

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize("number", CAUGHT)
def test_the_first_is_kept_and_each_is_told_once(number: int) -> None:
    async def run() -> tuple[list[int], int | None]:
        signals = Signals()
        assert signals.first is None
        told = []
        with signals.caught():
            for one in (number, signal.SIGTERM):
                following = signals.next()
                assert not following.done()
                os.kill(os.getpid(), one)
                told.append(await asyncio.wait_for(following, 5))
        return told, signals.first

    assert asyncio.run(run()) == ([number, signal.SIGTERM], number)


def test_what_was_ignored_stays_ignored() -> None:
    async def run() -> Signals:
        signals = Signals()
        with signals.caught():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0)
        return signals

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert asyncio.run(run()).first is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_behind_the_block_signals_are_what_they_were() -> None:
    async def run() -> None:
        with Signals().caught():
            pass
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    asyncio.run(run())
