"""A real browser without a screen: Chromium, told what to do by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 90.0
_POLL_S = 0.05


def find_chromium() -> str | None:
    """Path of a Chromium; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One page of the browser.

    Attributes:
        problems: what the page complained of: errors, refused scripts, dialogs.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self.problems: list[str] = []

    async def listen(self) -> None:
        """Takes answers and events; runs until cancelled."""
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            else:
                self._take(said["method"], said["params"])

    def _take(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"a dialog: {params['message']}")

    async def tell(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command; returns its result."""
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        async with asyncio.timeout(PATIENCE_S):
            said = await answer
        assert "error" not in said, said
        result: dict[str, Any] = said["result"]
        return result

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.tell(f"{domain}.enable")
        await self.tell("Page.navigate", url=url)

    async def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = await self.tell("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        """Waits until an expression is true in the page; the page may still be loading."""
        safe = f"(() => {{ try {{ return {expression} }} catch {{}} }})()"
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not await self.ask(safe):  # noqa: ASYNC110 - the page says nothing by itself
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            text = await self.ask("document.body.innerText")
            raise AssertionError(f"{expression} in vain; {self.problems}; {text}") from None

    async def text(self, selector: str) -> str:
        found: str = await self.ask(f"document.querySelector({selector!r}).textContent")
        return found

    async def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Another screen."""
        await self.tell(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.tell("Emulation.setEmulatedMedia", features=[feature])

    async def picture(self) -> bytes:
        """The whole page as PNG."""
        answer = await self.tell("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])


@contextlib.asynccontextmanager
async def browsing(profile: Path) -> AsyncIterator[Tab]:
    """A browser with one tab, ended at the end.

    Args:
        profile: a directory of its own.
    """
    path = find_chromium()
    assert path is not None, "asked before"
    command = [
        path, "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}",
        "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions",
        "--disable-background-networking", "--hide-scrollbars", "about:blank",
    ]  # fmt: skip
    if os.geteuid() == 0:
        command.insert(1, "--no-sandbox")  # as root it refuses to start with one
    with (profile / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    try:
        port = await _port(process, profile)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                (page,) = [x for x in await answer.json() if x["type"] == "page"]
            url = page["webSocketDebuggerUrl"]
            async with session.ws_connect(url, max_msg_size=0) as socket:
                tab = Tab(socket)
                listening = asyncio.ensure_future(tab.listen())
                try:
                    yield tab
                finally:
                    with contextlib.suppress(Exception):
                        await tab.tell("Browser.close")
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _port(process: asyncio.subprocess.Process, profile: Path) -> int:
    """The port that the browser took."""
    file = profile / "DevToolsActivePort"
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(FileNotFoundError, IndexError, ValueError):
                return int(file.read_text().splitlines()[0])
            assert process.returncode is None, (profile / "log").read_text()
            await asyncio.sleep(_POLL_S)
