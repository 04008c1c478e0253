"""A headless Chromium on the DevTools protocol, over pipes: no driver, no library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find() -> str:
    """The program, by its usual names."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        raise SystemExit(f"no Chromium here (looked for {', '.join(NAMES)}): apt-get install chromium")
    return found


class Page:
    """One tab: commands go out, events are kept."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._rest, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._receive, 1 << 16)
            if not read:
                raise RuntimeError("Chromium ended")
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """The window, in CSS pixels, and the colour scheme that the system is said to prefer."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, file: Path) -> float:
        """Load a file and wait until two frames were drawn after it; milliseconds."""
        self.events.clear()
        start = time.perf_counter()
        if failed := self.call("Page.navigate", url=file.resolve().as_uri()).get("errorText"):
            raise RuntimeError(f"{file}: {failed}")
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
        return 1000 * (time.perf_counter() - start)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def press(self, *keys: str) -> None:
        """Keys by their DOM names, one after another."""
        for key in keys:
            text = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def shot(self, file: Path, *, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **(self._clip() if whole else {}))
        file.write_bytes(base64.b64decode(answer["data"]))

    def _clip(self) -> dict[str, Any]:
        area = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {**area, "scale": 1}}

    def errors(self) -> list[str]:
        """What the console and the log say at the level of warnings and errors, and uncaught exceptions."""
        said = []
        for event in self.events:
            params = event.get("params", {})
            match event.get("method"):
                case "Runtime.exceptionThrown":
                    said.append(params["exceptionDetails"]["text"])
                case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                    said.append(str(params["args"]))
                case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                    said.append(params["entry"]["text"])
        return said

    def requests(self) -> list[str]:
        """Addresses that were asked for, but for the file itself and what is inside it."""
        sent = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in sent[1:] if not url.startswith(("data:", "blob:"))]


@contextmanager
def page() -> Iterator[Page]:
    """A tab in a Chromium of its own, without sandbox (containers have no user namespaces)."""
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless", "--no-sandbox", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        options += ["--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-background-networking"]

        # Chromium reads commands from 3 and writes answers to 4.
        onto = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        process = subprocess.Popen(
            ["/bin/sh", "-c", onto, find(), *options],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Page(ours_out, ours_in)
        finally:
            process.terminate()
            process.wait(timeout=30)
            os.close(ours_out)
            os.close(ours_in)
