# SPDX-License-Identifier: Apache-2.0
"""Connections are forwarded, byte by byte, until both sides have ended."""

from __future__ import annotations

import asyncio
import gc

from replicator.launch import relay


async def _answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers once all has been received, after asyncio had time to clean up."""
    asked = await reader.read()
    for _ in range(3):
        gc.collect()
        await asyncio.sleep(0)
    writer.write(asked.upper())
    writer.close()


async def _ask(text: bytes, unreachable: bool = False) -> bytes:
    behind = await asyncio.start_server(_answers, "127.0.0.1", 0)
    port = behind.sockets[0].getsockname()[1]
    if unreachable:
        behind.close()
        await behind.wait_closed()
    forward = relay.forwarder(lambda: asyncio.open_connection("127.0.0.1", port))
    between = await asyncio.start_server(forward, "127.0.0.1", 0)
    host, own = between.sockets[0].getsockname()
    reader, writer = await asyncio.open_connection(host, own)
    writer.write(text)
    writer.write_eof()
    said = await reader.read()
    writer.close()
    between.close()
    behind.close()
    return said


def test_an_answer_comes_after_all_was_asked() -> None:
    assert asyncio.run(asyncio.wait_for(_ask(b"x" * 10**6), 60)) == b"X" * 10**6


def test_who_cannot_be_reached_ends_the_connection() -> None:
    assert asyncio.run(asyncio.wait_for(_ask(b"", unreachable=True), 60)) == b""
