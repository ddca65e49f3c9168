"""A headless Chromium that scripts and tests drive by its own protocol: open a page, move the mouse, take a picture.

Needs the browser `chromium` and the package websocket-client. Nothing is fetched from elsewhere, and the profile is
empty and thrown away.

https://chromedevtools.github.io/devtools-protocol
"""

import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-port=0"),
    *("--disable-dev-shm-usage", "--remote-allow-origins=*"),
)
START_S, ANSWER_S = 60.0, 60.0


def why_not() -> str | None:
    """Why no browser can be driven here; None where one can."""
    if not any(shutil.which(name) for name in NAMES):
        return f"no browser: none of {', '.join(NAMES)}"
    try:
        import websocket  # noqa: F401
    except ImportError:
        return "the package websocket-client is not installed"
    return None


@contextlib.contextmanager
def browser() -> Iterator["Page"]:
    """A page of a browser that ends with the block."""
    command = next(path for name in NAMES if (path := shutil.which(name)))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        child = subprocess.Popen(
            [command, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            page = Page(_page_address(Path(profile) / "DevToolsActivePort", child))
            yield page
            page.close()
        finally:
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _page_address(file: Path, child: subprocess.Popen) -> str:
    """Address of the first page's web socket."""
    until = time.monotonic() + START_S
    while not (file.exists() and "\n" in file.read_text()):
        if child.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the browser did not start; exit code {child.poll()}")
        time.sleep(0.05)
    port = file.read_text().splitlines()[0]
    while time.monotonic() < until:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=START_S) as answer:
            pages = [target for target in json.load(answer) if target["type"] == "page"]
        if pages:
            return pages[0]["webSocketDebuggerUrl"]
        time.sleep(0.05)
    raise RuntimeError("the browser has no page")


class Page:
    """One page. `errors` collects what the console reports as an error, and exceptions that nothing caught."""

    def __init__(self, address: str) -> None:
        import websocket

        self._socket = websocket.create_connection(address, timeout=ANSWER_S)
        self._number = 0
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol, and its result."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        method, found = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = found["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(argument.get("value", "")) for argument in found["args"]))
        elif method == "Log.entryAdded" and found["entry"]["level"] == "error":
            self.errors.append(f"{found['entry']['text']} {found['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        """Go to an address."""
        self.call("Page.navigate", url=url)

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Pixels of the window, and whether its reader likes dark pages."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, in JSON types."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 20.0) -> Any:
        """The value of an expression as soon as it counts as true.

        Raises:
            TimeoutError: it did not in time.
        """
        until = time.monotonic() + seconds
        while not (value := self.run(script)):
            if time.monotonic() > until:
                raise TimeoutError(f"not true within {seconds} s: {script}; errors of the page: {self.errors}")
            time.sleep(0.05)
        return value

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """mouseMoved, mousePressed or mouseReleased at a place of the window."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the left button at one place and release it at another."""
        self.mouse("mouseMoved", *start)
        self.mouse("mousePressed", *start, button="left", buttons=1, clickCount=1)
        self.mouse("mouseMoved", (start[0] + end[0]) / 2, end[1], button="left", buttons=1)
        self.mouse("mouseMoved", *end, button="left", buttons=1)
        self.mouse("mouseReleased", *end, button="left", clickCount=1)

    def click(self, x: float, y: float, count: int = 1) -> None:
        """Click that often at one place."""
        for number in range(1, count + 1):
            self.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=number)
            self.mouse("mouseReleased", x, y, button="left", clickCount=number)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write what the window shows, or the whole page, as PNG."""
        clip = {}
        if whole:
            box = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"clip": {"x": 0, "y": 0, "width": box["width"], "height": box["height"], "scale": 1}}
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **clip)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
