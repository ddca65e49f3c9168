"""`tilewright serve`: a run or a model behind OpenAI's HTTP API."""

from typing import Any

import click

from tilewright.cli.common import FiniteRange, verbosity
from tilewright.cli.model_options import model_argument, model_options
from tilewright.core.errors import ConfigError, HardwareError
from tilewright.core.log import say
from tilewright.core.units import format_bytes, parse_bytes


@click.command()
@model_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="Address; another one is open to the network.")
@click.option(
    "--port",
    default=8000,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="First port to try; the next free one is used. 0: any free port.",
)
@click.option("--allow-host", multiple=True, help="Name that requests may have for the server, such as a proxy's.")
@click.option("--allow-origin", multiple=True, help="Web page that may ask, such as http://localhost:3000; * for all.")
@click.option("--api-key", envvar="TILEWRIGHT_API_KEY", default="", help="Key that clients must send. Default: none.")
@click.option("--concurrent", default=8, show_default=True, type=click.IntRange(1), help="Answers drawn at a time.")
@click.option("--waiting", default=32, show_default=True, type=click.IntRange(0), help="Answers that may wait.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    help="Maximum tokens per answer. Default: the model's context, and 2048 where a request does not say.",
)
@click.option(
    "--cache",
    default="",
    help="Memory for the key/value caches of all answers, such as 4GiB. Default: half of what is free.",
)
@click.option(
    "--chunk",
    default=128,
    show_default=True,
    type=click.IntRange(1),
    help="Tokens of prompts that are run between two tokens of the answers that are being drawn.",
)
@click.option(
    "--timeout", default=600.0, show_default=True, type=FiniteRange(0, min_open=True), help="Seconds per request."
)
@click.option(
    "--max-body",
    default=1024,
    show_default=True,
    type=click.IntRange(1),
    help="Maximum size of a request, in KiB.",
)
@model_options
@verbosity
def serve(
    name: str,
    host: str,
    port: int,
    allow_host: tuple[str, ...],
    allow_origin: tuple[str, ...],
    api_key: str,
    concurrent: int,
    waiting: int,
    max_tokens: int | None,
    cache: str,
    chunk: int,
    timeout: float,
    max_body: int,
    **opening: Any,
) -> None:
    """Serve the model of a run, or any model, behind OpenAI's API.

    RUN_OR_MODEL is a run folder or its name below `runs`, a Hugging Face folder, or a model of the hub,
    org/name[@revision]; without it `runs/latest`. It answers POST /v1/chat/completions and /v1/completions,
    GET /v1/models and /health, to this machine only unless --host says otherwise. Ctrl-C ends it.
    """
    try:
        from tilewright.serving.http_server import Limits, Server
        from tilewright.serving.server_process import bind
        from tilewright.serving.server_process import serve as run_server
    except ImportError as error:
        raise HardwareError(
            "Server needs the packages starlette and uvicorn",
            got=str(error),
            need="the extra `serve`",
            try_="pip install 'tilewright[serve]'",
        ) from error
    from tilewright.cli.open_model import open_model
    from tilewright.serving.answer_batch import Batch, free_bytes
    from tilewright.serving.session import Session
    from tilewright.serving.worker import Worker

    budget = _budget(cache)
    bound = bind(host, port)  # before the model is loaded, which may take minutes
    found = bound.getsockname()[1]
    if port not in (0, found):
        say(f"port {port} is in use: {found} instead", error=True)
    opened = open_model(name, **opening)
    session = Session(opened.model, opened.tokenizer, opened.chat, opened.device, opened.max_positions)
    if opened.chat is None:
        say("note: the model has no chat template: /v1/completions only (--chat-template gives it one)", error=True)
    limits = Limits(concurrent, waiting, max_tokens, timeout, max_body * 2**10)
    budget = free_bytes(session.device) // 2 if budget is None else budget
    batch = Batch(session.model, session.device, width=concurrent, chunk=chunk, budget_bytes=budget)
    with Worker(batch, concurrent, waiting) as worker:
        server = Server(
            *(session, opened.name, worker, limits, api_key),
            address=host,
            hosts=allow_host,
            origins=allow_origin,
        )
        address = f"http://{f'[{host}]' if ':' in host else host}:{found}/v1"

        def started() -> None:
            say(f"model {opened.name} at {address}{', with a key' if api_key else ''}")
            say(f"{concurrent} answers at a time, {waiting} may wait, {format_bytes(limits.body_bytes)} per request")
            if batch.most_positions is not None:
                say(f"caches of {format_bytes(budget)} hold {batch.most_positions:,} tokens of prompts and answers")

        run_server(server.app, bound, started)
    say("server ended")


def _budget(text: str) -> int | None:
    if not text:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(
            "Memory for caches is not a size", got=str(error), need="a size", try_="--cache 4GiB", where="--cache"
        ) from error
