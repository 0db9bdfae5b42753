"""Photographs a page in a headless Chromium, once it shows what it is looked at for."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import aiohttp

WAIT_S: Final = 120.0
POLL_S: Final = 0.2


def photograph(url: str, picture: Path, *, ready: str, size: tuple[int, int]) -> None:
    """Writes what a page shows.

    Args:
        url: of the page.
        picture: the PNG file.
        ready: JavaScript that gives true once all of it is there.
        size: width and height in pixels.

    Raises:
        TimeoutError: that did not come true within two minutes.
    """
    with tempfile.TemporaryDirectory(prefix="samestep-browser-") as profile:
        process = subprocess.Popen(
            [
                *("chromium", "--headless=new", "--no-sandbox", "--disable-gpu"),
                *("--hide-scrollbars", "--window-size={},{}".format(*size)),
                *(f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"),
            ],
            stderr=subprocess.DEVNULL,
        )
        try:
            asyncio.run(_photograph(Path(profile), url, picture, ready))
        finally:
            process.terminate()
            process.wait(WAIT_S)


async def _photograph(profile: Path, url: str, picture: Path, ready: str) -> None:
    """Through Chromium's DevTools protocol: https://chromedevtools.github.io/devtools-protocol/."""
    deadline = time.monotonic() + WAIT_S
    told = profile / "DevToolsActivePort"
    while not told.exists() or not told.read_text().strip():
        await _pause(deadline, "Chromium's port")
    port = told.read_text().split()[0]
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            page = next(target for target in await answer.json() if target["type"] == "page")
        address = page["webSocketDebuggerUrl"]
        async with session.ws_connect(address, max_msg_size=0) as socket:
            await _ask(socket, "Page.navigate", url=url)
            while not (await _ask(socket, "Runtime.evaluate", expression=ready))["result"].get(
                "value"
            ):
                await _pause(deadline, f"{url}: {ready}")
            shot = await _ask(socket, "Page.captureScreenshot", format="png")
    picture.write_bytes(base64.b64decode(shot["data"]))


async def _ask(socket: aiohttp.ClientWebSocketResponse, method: str, **params: Any) -> Any:
    """The result of a command; events are passed over."""
    await socket.send_str(json.dumps({"id": 1, "method": method, "params": params}))
    while True:
        answer = json.loads(await socket.receive_str(timeout=WAIT_S))
        if answer.get("id") == 1:
            return answer["result"]


async def _pause(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"{what}: not within {WAIT_S:g} s")
    await asyncio.sleep(POLL_S)
