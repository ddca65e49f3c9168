"""`tilewright serve`: a run or a model behind OpenAI's HTTP API."""

from typing import Any

import click

from tilewright.cli.common import verbosity
from tilewright.cli.model_options import model_argument, model_options
from tilewright.core.errors import HardwareError
from tilewright.core.log import say
from tilewright.core.units import format_bytes


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
@click.option("--concurrent", default=4, show_default=True, type=click.IntRange(1), help="Answers drawn at a time.")
@click.option("--waiting", default=32, show_default=True, type=click.IntRange(0), help="Requests that may wait.")
@click.option(
    "--max-tokens", default=2048, show_default=True, type=click.IntRange(1), help="Maximum tokens per answer."
)
@click.option(
    "--timeout", default=600.0, show_default=True, type=click.FloatRange(0, min_open=True), help="Seconds per request."
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
    max_tokens: int,
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
        from tilewright.serving.app import Limits, Server
        from tilewright.serving.run import bind
        from tilewright.serving.run import serve as run_server
    except ImportError as error:
        raise HardwareError(
            "Server needs the packages starlette and uvicorn",
            got=str(error),
            need="the extra `serve`",
            try_="pip install 'tilewright[serve]'",
        ) from error
    from tilewright.cli.open_model import open_model
    from tilewright.serving.session import Session
    from tilewright.serving.worker import Worker

    bound = bind(host, port)  # before the model is loaded, which may take minutes
    found = bound.getsockname()[1]
    if port not in (0, found):
        say(f"port {port} is in use: {found} instead", error=True)
    opened = open_model(name, **opening)
    session = Session(opened.model, opened.tokenizer, opened.chat, opened.device, opened.max_positions)
    if opened.chat is None:
        say("note: the model has no chat template: /v1/completions only (--chat-template gives it one)", error=True)
    limits = Limits(concurrent, waiting, max_tokens, timeout, max_body * 2**10)
    with Worker(concurrent, waiting) as worker:
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

        run_server(server.app, bound, started)
    say("server ended")
