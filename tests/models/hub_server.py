"""A hub on the loopback address: repositories of files, refusals, and a list of what was asked for."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class FakeHub:
    """Repositories by name: their files by path. `refused` answers with a status and the hub's code of the error."""

    repos: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    files_refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    cut_after: int | None = None
    """Bytes of a file of weights after which the connection is closed."""
    url: str = ""

    def commit(self, repo: str) -> str:
        """The hash of a repository's only revision."""
        files = self.repos[repo]
        return hashlib.sha1(repr(sorted((name, files[name]) for name in files)).encode()).hexdigest()


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve it; `hub.url` is where."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def do_HEAD(self):
            self.answer()

        def do_GET(self):
            self.answer()

        def answer(self):
            path = self.path.partition("?")[0].strip("/")
            hub.asked.append(f"{self.command} {path}")
            parts = path.split("/")
            api = parts[:2] == ["api", "models"]
            repo = "/".join(parts[2:4] if api else parts[:2])
            if repo in hub.refused:
                return self.refuse(*hub.refused[repo])
            if repo not in hub.repos:
                return self.refuse(404, "RepoNotFound")
            if not api:
                return self.file(repo, "/".join(parts[4:]))
            revision = parts[5] if len(parts) > 5 else "main"
            if revision not in ("main", hub.commit(repo)):
                return self.refuse(404, "RevisionNotFound")
            files = hub.repos[repo]
            if "tree" in parts:
                return self.json([{"type": "file", "path": n, "size": len(b), "oid": oid(b)} for n, b in files.items()])
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            return self.json({"id": repo, "sha": hub.commit(repo), "siblings": siblings})

        def file(self, repo, name):
            if repo in hub.files_refused:
                return self.refuse(*hub.files_refused[repo])
            content = hub.repos[repo][name]
            self.send_response(200)
            self.send_header("ETag", f'"{oid(content)}"')
            self.send_header("X-Repo-Commit", hub.commit(repo))
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                cut = hub.cut_after if name.endswith(".safetensors") else None
                self.wfile.write(content[:cut])
                if cut is not None:
                    self.close_connection = True
            return None

        def json(self, value):
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def refuse(self, status, code):
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def oid(content: bytes) -> str:
    """The hash by which the hub knows a file."""
    return hashlib.sha1(content).hexdigest()
