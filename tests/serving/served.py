"""A server of a tiny model in this process, and raw requests to it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import torch
import uvicorn

from tests.cli.tuned import make_model
from tilewright.cli.open_model import open_model
from tilewright.serving.answer_batch import Batch
from tilewright.serving.http_server import Limits, Server
from tilewright.serving.server_process import bind, server_config
from tilewright.serving.session import Session
from tilewright.serving.worker import Draws, Worker

NAME = "tiny"


def make_session(folder: Path, kind: str = "llama") -> Session:
    """A model with the ChatML template and 256 positions."""
    threads = torch.get_num_threads()  # not those of the machine: tests of small models run beside others
    opened = open_model(str(make_model(folder, kind)), device="cpu", threads=threads)
    return Session(opened.model, opened.tokenizer, opened.chat, opened.device, opened.max_positions)


def make_batch(session: Session, width: int, budget_bytes: int = 2**30, chunk: int = 128) -> Batch:
    """What draws for it."""
    return Batch(session.model, session.device, width=width, chunk=chunk, budget_bytes=budget_bytes)


@contextmanager
def serving(
    session: Session, limits: Limits | None = None, key: str = "", draws: Draws | None = None
) -> Iterator[tuple[int, Worker]]:
    """The port, and the worker."""
    limits = limits or Limits()
    bound = bind("127.0.0.1", 0)
    draws = draws or make_batch(session, limits.concurrent)
    with Worker(draws, limits.concurrent, limits.waiting) as worker:
        app = Server(session, NAME, worker, limits, key).app
        server = uvicorn.Server(server_config(app, grace_seconds=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        try:
            yield bound.getsockname()[1], worker
        finally:
            server.should_exit = True
            thread.join()
            bound.close()


def post(port: int, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers of an answer; bytes are sent as they are."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    connection.request("POST", path, sent, headers)
    answer = connection.getresponse()
    content = json.loads(answer.read())
    connection.close()
    return answer.status, content, {key.lower(): value for key, value in answer.getheaders()}
