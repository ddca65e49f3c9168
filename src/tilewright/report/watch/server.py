"""The watching page on 127.0.0.1: a few fixed addresses, all read-only.

    /            the page        /pages/NAME    its style sheet and scripts
    /api/view    JSON            /report/KEY    report.html of a run, made at that moment

No part of an address becomes a path of the file system: pages are read at the start, runs are found by a key.
A request that names another host is rejected (a web page may point its own name at 127.0.0.1: DNS rebinding), and so is
one that a page of another site makes.
"""

import errno
import json
import math
import sys
import threading
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote

from tilewright.core.errors import ConfigError
from tilewright.core.log import get_logger
from tilewright.core.web_origin import own_names, why_not
from tilewright.report.template import read
from tilewright.report.watch.export import ExportError, export_report
from tilewright.report.watch.run_set import RunSet
from tilewright.report.watch.system_load import SystemLoad
from tilewright.report.watch.view import BadQuery, ViewQuery, view


def compact_json(value: Any) -> str:
    """Write compact JSON: text without blanks; floats with six figures (integers up to 2**53 with all of theirs).

    Raises:
        TypeError: JSON does not have such an object.

    Example:
        >>> compact_json({"y": [1.0, 0.1234567, float("nan")], "name": "a"})
        '{"y":[1,0.123457,null],"name":"a"}'
    """
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{json.dumps(str(key))}:{compact_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join([_float(item) if type(item) is float else compact_json(item) for item in value]) + "]"
    return json.dumps(value)


def _float(value: float) -> str:
    if not math.isfinite(value):
        return "null"
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else f"{value:.6g}"


ADDRESS = "127.0.0.1"
TRIED_PORTS = 20
"""Ports that are tried from the first one on."""
_PAGES = {"watch.html": "text/html", "watch.css": "text/css"} | dict.fromkeys(
    ("watch.js", "chart.js", "panels.js", "format.js"), "text/javascript"
)
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'"
_HEADERS = {
    "Content-Security-Policy": f"{_POLICY}; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",  # a page asks once per second; a connection kept open would keep a thread
}
_log = get_logger(__name__)


class WatchServer(ThreadingHTTPServer):
    """Serves the page of some runs until `shutdown`.

    Args:
        runs: run folders, each with a run.toml.
        port: first port that is tried; 0 is any free one. `server_port` says which it became.

    Raises:
        ConfigError: none of the ports is free.
    """

    daemon_threads = True

    def __init__(self, runs: Sequence[Path], port: int) -> None:
        self.runs = RunSet(runs)
        self.load = SystemLoad()
        self.exporting = threading.Lock()
        """One report at a time."""
        self.pages = _read_pages()
        self._bind(port)

    @property
    def url(self) -> str:
        """Address of the watching server's page."""
        return f"http://{ADDRESS}:{self.server_port}/"

    def _bind(self, port: int) -> None:
        last = port if port == 0 else min(port + TRIED_PORTS - 1, 65535)
        for number in range(port, last + 1):
            try:
                super().__init__((ADDRESS, number), WatchHandler)
                return
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                reason = error.strerror
        raise ConfigError(
            "No free port for the page",
            got=f"{port} to {last}: {reason}",
            need="a port of 127.0.0.1 that no other program uses",
            try_="--port 0, which takes any free one",
            where="--port",
        )

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a page that was closed in the middle of an answer; other errors of the watching server keep their
        traceback."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class WatchHandler(BaseHTTPRequestHandler):
    """Handles one connection to the watching page."""

    server: WatchServer
    protocol_version = "HTTP/1.1"
    server_version = "tilewright"
    sys_version = ""
    timeout = 60
    wbufsize = -1  # head and body of an answer in one packet, or the second waits for the first one's acknowledgement

    def do_GET(self) -> None:
        """Answer a request to the watching server for any of the page's addresses."""
        if self._is_allowed():
            path, _, query = self.path.partition("?")
            self._answer(path, query)

    do_HEAD = do_GET

    def _answer(self, path: str, query: str) -> None:
        if path == "/":
            self._page("watch.html")
        elif path.startswith("/pages/"):
            self._page(path.removeprefix("/pages/"))
        elif path == "/api/view":
            self._view(query)
        elif path.startswith("/report/"):
            self._report(path.removeprefix("/report/"))
        else:
            self._text(HTTPStatus.NOT_FOUND, "no such page")

    def _is_allowed(self) -> bool:
        """True if the watching server may answer this request. False, with the refusal sent, if another host or site
        sent it."""
        headers = {name.lower(): value for name, value in self.headers.items()}
        if self.path == "/":  # a link on another page may lead here
            headers.pop("sec-fetch-site", None)
        why = why_not(headers, own_names(ADDRESS), any_ip=False)
        if why:
            self._text(HTTPStatus.FORBIDDEN, f"this page does not answer: {why}")
        return not why

    def _page(self, name: str) -> None:
        if name not in self.server.pages:
            self._text(HTTPStatus.NOT_FOUND, "no such page")
            return
        self._send(HTTPStatus.OK, self.server.pages[name], f"{_PAGES[name]}; charset=utf-8")

    def _view(self, query: str) -> None:
        try:
            wanted = ViewQuery.parse(dict(parse_qsl(query, max_num_fields=10)))
        except ValueError as error:  # of ours, or too many fields
            self._text(HTTPStatus.BAD_REQUEST, str(error) if isinstance(error, BadQuery) else "too many fields")
            return
        found = view(self.server.runs, self.server.load, wanted)
        self._send(HTTPStatus.OK, compact_json(found).encode("utf-8"), "application/json")

    def _report(self, key: str) -> None:
        run = self.server.runs.find(key)
        if run is None:
            self._text(HTTPStatus.NOT_FOUND, "no such run")
            return
        try:
            with self.server.exporting:
                page = export_report(run.folder)
        except ExportError as error:
            self._text(HTTPStatus.INTERNAL_SERVER_ERROR, f"The report cannot be made: {error}")
            return
        name = f"{run.folder.name}-report.html"
        disposition = f"attachment; filename=\"report.html\"; filename*=UTF-8''{quote(name, safe='', errors='replace')}"
        self._send(HTTPStatus.OK, page, "text/html; charset=utf-8", {"Content-Disposition": disposition})

    def _text(self, status: HTTPStatus, text: str) -> None:
        self._send(status, text.encode("utf-8"), "text/plain; charset=utf-8")

    def _send(self, status: HTTPStatus, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log requests to the watching server as details."""
        _log.debug(format, *args)


def _read_pages() -> dict[str, bytes]:
    """Pages of the watching server, the package's own files; the style sheet begins with that of the report."""
    folder = resources.files("tilewright.report.watch").joinpath("pages")
    found = {name: folder.joinpath(name).read_text(encoding="utf-8") for name in _PAGES}
    found["watch.css"] = read("page.css") + found["watch.css"]
    return {name: text.encode("utf-8") for name, text in found.items()}
