"""Pages in a headless Chromium: photographed, or asked what they came to."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp

WAIT_S: Final = 120.0
POLL_S: Final = 0.2
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What a page came to.

    Attributes:
        answer: what it was asked for.
        requests: addresses that it, or a page within it, asked for, its own too; in order.
        complaints: errors and warnings, thrown or on the console.
    """

    answer: Any
    requests: tuple[str, ...]
    complaints: tuple[str, ...]


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

    async def shoot(page: _Page) -> bytes:
        await page.go(url)
        await page.until(ready)
        shot = await page.ask("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])

    picture.write_bytes(_in_chromium(shoot, size))


def look(
    url: str, *, ready: str, asked: str, size: tuple[int, int], within: bool = False
) -> Looked:
    """Opens a page without a network and asks it something.

    Args:
        url: of the page.
        ready: JavaScript that gives true once all of it is there.
        asked: JavaScript that gives what is to be known, as plain data.
        size: width and height in pixels.
        within: ask the page in its only frame instead.

    Raises:
        TimeoutError: `ready` did not come true within two minutes.
    """

    async def study(page: _Page) -> Looked:
        await page.watch()
        await page.go(url)
        await page.until(ready, within=within)
        answer = await page.evaluate(asked, within=within)
        return Looked(
            answer=answer, requests=tuple(page.requests), complaints=tuple(page.complaints)
        )

    return _in_chromium(study, size)


def _in_chromium(use: Callable[[_Page], Awaitable[T]], size: tuple[int, int]) -> T:
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
            return asyncio.run(_with_page(Path(profile), use))
        finally:
            process.terminate()
            process.wait(WAIT_S)


async def _with_page(profile: Path, use: Callable[[_Page], Awaitable[T]]) -> T:
    async with _opened(profile) as page:
        return await use(page)


@asynccontextmanager
async def _opened(profile: Path) -> AsyncIterator[_Page]:
    """Through Chromium's DevTools protocol: https://chromedevtools.github.io/devtools-protocol/."""
    deadline = time.monotonic() + WAIT_S
    told = profile / "DevToolsActivePort"
    while not told.exists() or not told.read_text().strip():
        await _pause(deadline, "Chromium's port")
    port = told.read_text().split()[0]
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            page = next(target for target in await answer.json() if target["type"] == "page")
        async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            yield _Page(socket, deadline)


class _Page:
    """The browser's one page; takes in what it tells by itself with each command."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, deadline: float) -> None:
        self._socket, self._deadline = socket, deadline
        self._num_asked, self._answers = 0, dict[int, Any]()
        self._frames: list[str] = []
        self.requests: list[str] = []
        self.complaints: list[str] = []

    async def go(self, url: str) -> None:
        """Leaves for another address."""
        await self.ask("Page.navigate", url=url)

    async def watch(self, frame: str | None = None) -> None:
        """Takes the network away, and is told of requests, complaints and frames from now on.

        Args:
            frame: in one of them, which waits for it; None: in the page.
        """
        for domain in ("Runtime", "Log", "Network"):
            await self.ask(f"{domain}.enable", frame)
        none = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        await self.ask("Network.emulateNetworkConditions", frame, offline=True, **none)
        held = {"autoAttach": True, "waitForDebuggerOnStart": True, "flatten": True}
        await self.ask("Target.setAutoAttach", frame, **held)
        if frame is not None:
            await self.ask("Runtime.runIfWaitingForDebugger", frame)

    async def until(self, ready: str, *, within: bool = False) -> None:
        """Waits until an expression is true."""
        while not await self.evaluate(ready, within=within):
            await _pause(self._deadline, ready)

    async def evaluate(self, expression: str, *, within: bool = False) -> Any:
        """What an expression gives; None where it throws, or there is no such frame yet."""
        given = {"expression": expression, "returnByValue": True}
        found = await self.ask("Runtime.evaluate", **given)
        if within:
            if not self._frames:
                return None
            found = await self.ask("Runtime.evaluate", self._frames[0], **given)
        return found["result"].get("value")

    async def ask(self, method: str, frame: str | None = None, **params: Any) -> Any:
        """The result of a command, put to a frame or to the page."""
        self._num_asked += 1
        asked = {"id": self._num_asked, "method": method, "params": params}
        where = {} if frame is None else {"sessionId": frame}
        await self._socket.send_str(json.dumps(asked | where))
        while asked["id"] not in self._answers:
            told = json.loads(await self._socket.receive_str(timeout=WAIT_S))
            if "id" in told:
                self._answers[told["id"]] = told
            elif told["method"] == "Target.attachedToTarget":
                self._frames.append(told["params"]["sessionId"])
                await self.watch(self._frames[-1])
            else:
                self._note(told["method"], told["params"])
        answer = self._answers.pop(asked["id"])
        if "error" in answer:
            raise RuntimeError(f"Chromium refuses {method}: {answer['error']['message']}")
        return answer["result"]

    def _note(self, event: str, told: Any) -> None:
        match event:
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])
            case "Log.entryAdded" if told["entry"]["level"] in ("warning", "error"):
                self.complaints.append(told["entry"]["text"])
            case "Runtime.consoleAPICalled" if told["type"] in ("warning", "error", "assert"):
                self.complaints.append(" ".join(str(arg.get("value")) for arg in told["args"]))
            case "Runtime.exceptionThrown":
                self.complaints.append(str(told["exceptionDetails"]))


async def _pause(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"{what}: not within {WAIT_S:g} s")
    await asyncio.sleep(POLL_S)
