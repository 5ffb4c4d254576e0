"""Chromium, driven over a pipe, for the tests of the page: its DevTools protocol, without a library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SECONDS = 30.0


class Page:
    """A page of a browser. errors: of its scripts."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.errors: list[str] = []

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.send(method, params, self._session)

    def run(self, script: str) -> Any:
        """The value of an expression."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"]["exception"].get("description"))
        return answer["result"].get("value")

    def wait(self, script: str) -> Any:
        """The value of an expression, once it is true."""
        end = time.monotonic() + SECONDS
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"not so: {script}\n{self.run('document.body.innerText')}"
            time.sleep(0.02)
        return value

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def reload(self) -> None:
        self.run("window.left = true")
        self.send("Page.reload")
        self.wait("!window.left && document.readyState === 'complete'")

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, name: str, within: str = "body") -> None:
        """Click the visible button of that name."""
        found = f"[...document.querySelectorAll({json.dumps(within + ' button')})].findLast((one) => "
        found += f"one.innerText === {json.dumps(name)} && one.offsetParent && !one.disabled)"
        self.wait(f"((one) => {{ one?.click(); return Boolean(one); }})({found})")

    def ask(self, text: str) -> None:
        """Send a message."""
        self.run(f"document.getElementById('text').value = {json.dumps(text)}")
        self.click("Send", "#ask")


class Browser:
    def __init__(self, home: Path) -> None:
        assert CHROMIUM is not None
        (take, self._write), (self._read, give) = os.pipe(), os.pipe()

        def inherit() -> None:  # the pipes must be 3 and 4
            high = os.dup(take), os.dup(give)
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        options = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,800")
        self._process = subprocess.Popen(
            [CHROMIUM, *options, f"--user-data-dir={home}", "--remote-debugging-pipe", "about:blank"],
            env=os.environ | {"HOME": str(home)}, close_fds=False, preexec_fn=inherit, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(take)
        os.close(give)
        self._number, self._left = 0, b""
        self._pages: dict[str, Page] = {}

    def send(self, method: str, params: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        data = json.dumps(message | ({"sessionId": session} if session else {})).encode()
        os.write(self._write, data + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._happened(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            data = os.read(self._read, 1 << 16)
            assert data, "the browser has ended"
            self._left += data
        first, _, self._left = self._left.partition(b"\0")
        return dict(json.loads(first))

    def _happened(self, event: dict[str, Any]) -> None:
        page, method = self._pages.get(event.get("sessionId", "")), event.get("method")  # none: of a dialog's answer
        if page is not None and method == "Runtime.exceptionThrown":
            details = event["params"]["exceptionDetails"]
            page.errors.append(str(details.get("exception", {}).get("description") or details["text"]))
        if page is not None and method == "Page.javascriptDialogOpening":
            data = {"id": 1 << 30, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
            os.write(self._write, json.dumps(data | {"sessionId": event["sessionId"]}).encode() + b"\0")

    def page(self) -> Page:
        target = self.send("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime"):
            page.send(f"{domain}.enable")
        return page

    def close(self) -> None:
        os.close(self._write)
        self._process.wait(30)
        os.close(self._read)


@contextmanager
def browsing(home: Path) -> Iterator[Browser]:
    browser = Browser(home)
    try:
        yield browser
    finally:
        browser.close()
