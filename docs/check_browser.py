# SPDX-License-Identifier: Apache-2.0
"""Checks the built site with a headless Chromium: `python -m docs.check_browser`.

Loads every page at the width of a desktop and of a phone. Problems are: an error in the
console, a request to another host, a failed request, a picture that does not load or
shows nothing, a body that scrolls sideways, a table or a block of code that is wider
than its column. The search has to find `reduce_scatter`.
Prints the problems; the exit status is 1 if there are any, and 2 without a Chromium.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import http.server
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from absl import app, flags
from tornado import websocket

_SITE = pathlib.Path(__file__).parent / "_build" / "html"
_FOLDER = flags.DEFINE_string("site", os.fspath(_SITE), "The folder of the site.")
_SHOTS = flags.DEFINE_string("screenshots", None, "A folder for pictures of pages.")
_PAGES = flags.DEFINE_list("pages", None, "Pages to look at, e.g. index.html; all.")

WIDTHS = {"desk": 1280, "phone": 390}
_HEIGHT = 844
_PATIENCE = 30.0  # seconds per page
_START = 120.0  # seconds for the browser
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# An inline picture is marked by its role. It may take up space and draw nothing, or
# draw something and take up no space.
_LOOK = """
(() => {
  const large = box => box.width > 1 && box.height > 1;
  const drawn = [...document.querySelectorAll('svg[role=img]')];
  const shown = svg => large(svg.getBoundingClientRect()) && large(svg.getBBox());
  const name = e => e.innerText.trim().slice(0, 50).replaceAll('\\n', ' ');
  const over = e => e.getBoundingClientRect().right -
    e.parentElement.getBoundingClientRect().right;
  // Code scrolls in its block. A table has to fit, since nobody scrolls a table.
  const wide = [...document.querySelectorAll('article pre, article table')]
    .filter(e => over(e) > 1);
  return {
    wide: wide.map(e => `${e.tagName.toLowerCase()} "${name(e)}" by ${over(e)} px`),
    width: document.documentElement.scrollWidth,
    text: document.body.innerText.length,
    broken: [...document.images].filter(i => !(i.complete && i.naturalWidth))
      .map(i => i.currentSrc || i.src),
    blank: drawn.filter(svg => !shown(svg)).map(svg =>
      `${drawn.indexOf(svg) + 1} of ${drawn.length} (${svg.ariaLabel || 'no label'})`),
  };
})()
"""
_FOUND = "[...document.querySelectorAll('ul.search li a')].map(a => a.textContent)"
_READY = "document.readyState === 'complete' && document.fonts.status === 'loaded'"


class NoBrowser(Exception):
    """Chromium is not installed."""


class Tab:
    """A browser tab, controlled by the developer tools protocol."""

    def __init__(self, connection: websocket.WebSocketClientConnection) -> None:
        self._connection = connection
        self._number = 0
        self.events: list[dict[str, Any]] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol; keeps the events that arrive meanwhile."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        await self._connection.write_message(json.dumps(message))
        while True:
            text = await asyncio.wait_for(self._connection.read_message(), _PATIENCE)
            if text is None:
                raise ConnectionError("the browser has ended")
            answer = json.loads(text)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    async def ask(self, script: str) -> Any:
        """Returns the value of a script in the page."""
        result = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True
        )
        return result["result"].get("value")

    async def wait(self, script: str) -> bool:
        """Waits until a script is true; returns whether it became so."""
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            if await self.ask(script):
                return True
            await asyncio.sleep(0.05)
        return False

    async def open(self, address: str, width: int) -> None:
        """Loads a page, at a width in pixels."""
        self.events.clear()
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=_HEIGHT,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        await self.call("Page.navigate", url=address)
        await self.wait(f"location.href === {json.dumps(address)} && {_READY}")

    async def picture(self, path: pathlib.Path) -> None:
        """Writes a picture of the whole page."""
        shot = await self.call(
            "Page.captureScreenshot", captureBeyondViewport=True, format="png"
        )
        path.write_bytes(base64.b64decode(shot["data"]))


def problems(
    site: pathlib.Path,
    pages: Sequence[str] | None = None,
    search: str = "reduce_scatter",
    screenshots: pathlib.Path | None = None,
) -> list[str]:
    """Returns a site's problems, as seen by a browser.

    Args:
        site: The folder of its pages.
        pages: The pages to check; None for all.
        search: A text that the search has to find in the title of a page; "" skips it.
        screenshots: A folder for a picture of each page at each width.

    Raises:
        NoBrowser: Chromium is not installed.
    """
    if pages is None:
        paths = sorted(site.rglob("*.html"))
        pages = [path.relative_to(site).as_posix() for path in paths]
    return asyncio.run(_problems(site, pages, search, screenshots))


async def _problems(
    site: pathlib.Path,
    pages: Sequence[str],
    search: str,
    screenshots: pathlib.Path | None,
) -> list[str]:
    wrong = []
    with _served(site) as root:
        async with _tab() as tab:
            for page in pages:
                for name, width in WIDTHS.items():
                    await tab.open(f"{root}/{page}", width)
                    complaints = await _seen(tab, root, width)
                    wrong += [
                        f"{page} on a {name}: {complaint}" for complaint in complaints
                    ]
                    if screenshots is not None:
                        flat = page.removesuffix(".html").replace("/", "-")
                        await tab.picture(screenshots / f"{flat}-{name}.png")
            if search:
                wrong += await _searched(tab, root, search)
    return wrong


async def _seen(tab: Tab, root: str, width: int) -> list[str]:
    """Returns the problems of the page that is open."""
    facts = await tab.ask(_LOOK)
    wrong = [f"the picture {source} does not load" for source in facts["broken"]]
    wrong += [f"the inline picture {which} shows nothing" for which in facts["blank"]]
    wrong += [f"the {which} is wider than its column" for which in facts["wide"]]
    if facts["width"] > width:
        wrong.append(f"is {facts['width']} pixels wide, and there are {width}")
    if not facts["text"]:
        wrong.append("is empty")
    for event in tab.events:
        complaint = _complaint(event["method"], event["params"], root)
        if complaint:
            wrong.append(complaint)
    return wrong


def _complaint(method: str, params: dict[str, Any], root: str) -> str:
    """Returns the problem that a browser event reports, or ""."""
    if method == "Runtime.exceptionThrown":
        details = params["exceptionDetails"]
        text = details.get("exception", {}).get("description") or details["text"]
        return f"a script fails: {text}"
    if method == "Runtime.consoleAPICalled" and params["type"] == "error":
        text = " ".join(str(part.get("value")) for part in params["args"])
        return f"an error in the console: {text}"
    if method == "Log.entryAdded" and params["entry"]["level"] == "error":
        entry = params["entry"]
        if entry.get("url", "").endswith("/favicon.ico"):  # no page asked for it
            return ""
        return f"an error in the console: {entry['text']} {entry.get('url', '')}"
    if method == "Network.requestWillBeSent":
        address = params["request"]["url"]
        if not address.startswith((root, "data:", "blob:")):
            return f"asks another host for {address}"
    return ""


async def _searched(tab: Tab, root: str, text: str) -> list[str]:
    await tab.open(f"{root}/search.html?q={text}", WIDTHS["desk"])
    if await tab.wait(f"{_FOUND}.some(t => t.includes({json.dumps(text)}))"):
        return []
    return [f"the search does not find {text}: {await tab.ask(_FOUND)}"]


# --- Subprocesses ---------------------------------------------------------------------


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Logs nothing."""


@contextlib.contextmanager
def _served(site: pathlib.Path) -> Iterator[str]:
    """Serves a folder in this block, and yields its address."""
    handler = functools.partial(_Quiet, directory=os.fspath(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def browser() -> str:
    """Returns the path of a Chromium.

    Raises:
        NoBrowser: There is none.
    """
    for name in (os.environ.get("CHROMIUM", ""), *_NAMES):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise NoBrowser(
        "there is no Chromium: install it (apt-get install chromium), or name it by "
        "the environment variable CHROMIUM"
    )


@contextlib.asynccontextmanager
async def _tab() -> AsyncIterator[Tab]:
    """Starts a browser, and yields a tab of it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [
                *(browser(), "--headless=new", "--no-sandbox", "--disable-gpu"),
                *("--no-first-run", "--disable-background-networking"),
                *("--remote-debugging-port=0", f"--user-data-dir={folder}"),
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port = await _port(pathlib.Path(folder) / "DevToolsActivePort", process)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
                tabs = [t for t in json.load(answer) if t["type"] == "page"]
            connection = await websocket.websocket_connect(
                tabs[0]["webSocketDebuggerUrl"], max_message_size=1 << 30
            )
            tab = Tab(connection)
            for domain in ("Page", "Runtime", "Log", "Network"):
                await tab.call(f"{domain}.enable")
            yield tab
            connection.close()
        finally:
            process.terminate()
            process.wait()


async def _port(path: pathlib.Path, process: subprocess.Popen[bytes]) -> int:
    """Returns the port that a browser writes to a file when it listens."""
    end = time.monotonic() + _START
    while time.monotonic() < end and process.poll() is None:
        if path.exists() and path.read_text().strip():
            return int(path.read_text().split()[0])
        await asyncio.sleep(0.05)
    raise NoBrowser(f"{browser()} does not start")


def main(argv: Sequence[str]) -> int:
    """Checks the site; returns the exit status."""
    del argv
    screenshots = None if _SHOTS.value is None else pathlib.Path(_SHOTS.value)
    if screenshots is not None:
        screenshots.mkdir(parents=True, exist_ok=True)
    site = pathlib.Path(_FOLDER.value)
    if not (site / "index.html").exists():
        print(f"{site} holds no site: make docs", file=sys.stderr)
        return 2
    try:
        wrong = problems(site, _PAGES.value, screenshots=screenshots)
    except NoBrowser as error:
        print(error, file=sys.stderr)
        return 2
    print(*wrong, sep="\n")
    print(f"{len(wrong)} problems", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    app.run(main)
