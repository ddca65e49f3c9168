"""The HTTP side: OpenAI's `/v1/chat/completions`, `/v1/completions`, `/v1/models`, and `/health`.

Answers are drawn by `worker.Worker`; here requests are read within limits, checked, and their answers written.
Everything wrong with a request is a status 4xx with OpenAI's error object.
"""

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tilewright.core.errors import TilewrightError
from tilewright.core.web_origin import own_names, why_not
from tilewright.models.sampling import Sampling
from tilewright.serving.protocol import ApiError, ChatRequest, TextRequest, parse
from tilewright.serving.session import AnswerSettings, AnswerStream, PromptTooLongError, Session
from tilewright.serving.worker import BusyError, Job, OutOfTimeError, StoppedError, Worker

_CLOSED = 499
"""What proxies log where the client left; nobody reads it."""
_DRAINED = 8
"""Times the limit of a body that is read and dropped, so that a client that still sends gets to read the refusal."""


@dataclass(frozen=True)
class Limits:
    """What one request, and all together, may take.

    Args:
        concurrent: answers that are drawn at the same time.
        waiting: requests that wait beside them; more get status 429.
        max_tokens: of an answer; a request that asks for more is refused, one that asks for none gets these.
        seconds: from a request to the end of its answer.
        body_bytes: of a request.
        body_seconds: until a request's body is there.
    """

    concurrent: int = 4
    waiting: int = 32
    max_tokens: int = 2048
    seconds: float = 600.0
    body_bytes: int = 2**20
    body_seconds: float = 10.0


class OwnHosts:
    """Answers 403 to requests that name another host or come from a page of another site."""

    def __init__(self, app: ASGIApp, address: str, hosts: Sequence[str], origins: Sequence[str]):
        self._app, self._origins = app, origins
        self._names = own_names(address) | {host.lower() for host in hosts}
        self._any_ip = address not in own_names("127.0.0.1")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            why = why_not(headers, self._names, any_ip=self._any_ip, origins=self._origins)
            if why:
                what = f"This server does not answer: {why}. --allow-host and --allow-origin add names"
                await JSONResponse(ApiError(403, what, code="forbidden_origin").to_json(), 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Server:
    """The application of one model.

    Args:
        session: the model.
        name: under which clients ask for it.
        worker: running.
        limits: see `Limits`; those of the worker are the worker's.
        key: that clients must send; "": none.
        address: at which the server listens; says which hosts a request may name (`core.web_origin`).
        hosts: names that it has beside its own, such as a proxy's.
        origins: web pages that may ask from a browser (CORS), such as `http://localhost:3000`; `*`: all.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        worker: Worker,
        limits: Limits,
        key: str = "",
        *,
        address: str = "127.0.0.1",
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
    ):
        self.session, self.name, self.worker, self.limits, self.key = session, name, worker, limits, key
        self._created = int(time.time())
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._text, methods=["POST"]),
        ]
        handlers: Any = {ApiError: _refuse, HTTPException: _refuse_http}
        middleware = [Middleware(OwnHosts, address=address, hosts=hosts, origins=origins)]
        if origins:
            cors = {"allow_methods": ["*"], "allow_headers": ["*"], "allow_private_network": True}
            middleware.append(Middleware(CORSMiddleware, allow_origins=list(origins), **cors))
        self.app = Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)

    async def _health(self, request: Request) -> Response:
        active, waiting = self.worker.load()
        return JSONResponse({"status": "ok", "model": self.name, "active": active, "waiting": waiting})

    async def _models(self, request: Request) -> Response:
        self._check_key(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        self._check_key(request)
        self._check_name(request.path_params["name"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self._created, "owned_by": "tilewright"}

    async def _chat(self, request: Request) -> Response:
        asked: ChatRequest = await self._read(request, ChatRequest)
        if self.session.chat is None:
            what = "The model has no chat template: use /v1/completions, or start the server with --chat-template"
            raise ApiError(400, what, code="no_chat_template")
        messages = [message.to_template() for message in asked.messages]
        ids = await asyncio.to_thread(_refused_as_400, lambda: self.session.chat_ids(messages), "messages")
        return await self._answer(request, asked, ids, Shape("chat"))

    async def _text(self, request: Request) -> Response:
        asked: TextRequest = await self._read(request, TextRequest)
        prompt = asked.prompt
        if isinstance(prompt, list) and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            text = prompt
            ids = await asyncio.to_thread(self.session.text_ids, text)
        else:
            ids = [int(i) for i in prompt]
            if not all(0 <= i < self.session.tokenizer.vocab_size for i in ids):
                what = f"prompt: ids must be from 0 to {self.session.tokenizer.vocab_size - 1}"
                raise ApiError(400, what, "prompt", "invalid_value")
        return await self._answer(request, asked, ids, Shape("text"))

    async def _read(self, request: Request, kind: type[Any]) -> Any:
        self._check_key(request)
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":  # which no web page can send here without being asked first
            raise ApiError(415, "The content-type must be application/json", code="unsupported_media_type")
        asked = parse(await self._body(request), kind)
        self._check_name(asked.model)
        if (asked.asked_tokens() or 0) > self.limits.max_tokens:
            what = f"This server draws at most {self.limits.max_tokens} tokens per answer"
            raise ApiError(400, what, "max_tokens", "invalid_value")
        return asked

    async def _body(self, request: Request) -> bytes:
        limit, parts, size = self.limits.body_bytes, [], 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size <= limit:
                        parts.append(chunk)
                    elif size > _DRAINED * limit:
                        break
        except TimeoutError:
            what = f"The body did not come within {self.limits.body_seconds:g} s"
            raise ApiError(408, what, code="body_too_slow") from None
        except ClientDisconnect:
            raise ApiError(_CLOSED, "The client left") from None
        if size > limit:
            raise ApiError(413, f"The body is longer than {limit} bytes", code="body_too_large")
        return b"".join(parts)

    def _check_key(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), self.key.encode())
        if self.key and not (scheme.lower() == "bearer" and right):
            raise ApiError(401, "The key is wrong or missing", code="invalid_api_key")

    def _check_name(self, name: str) -> None:
        if name != self.name:
            what = f"No model {name[:200]!r} here; there is {self.name!r}"
            raise ApiError(404, what, "model", "model_not_found")

    async def _answer(self, request: Request, asked: Any, ids: list[int], shape: "Shape") -> Response:
        default = Sampling()
        sampling = Sampling(
            default.temperature if asked.temperature is None else asked.temperature,
            asked.top_k or 0,
            default.top_p if asked.top_p is None else asked.top_p,
        )
        settings = AnswerSettings(asked.asked_tokens() or self.limits.max_tokens, sampling, asked.stops(), asked.seed)
        param = "messages" if shape.is_chat else "prompt"
        answer = _refused_as_400(lambda: self.session.answer(ids, settings, turn=shape.is_chat), param)
        pieces: asyncio.Queue[tuple[str | None, BaseException | None]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(piece: str | None, error: BaseException | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(pieces.put_nowait, (piece, error))

        job = Job(iter(answer), emit, self.limits.seconds)
        try:
            self.worker.submit(job)
        except (BusyError, StoppedError) as error:
            raise _as_api_error(error) from None
        shape.begin(self.name)
        usage = _usage(len(ids), answer)
        if asked.stream:
            first = await self._first(request, job, pieces)
            include = asked.stream_options is not None and asked.stream_options.include_usage
            events = _events(job, first, pieces, answer, shape, usage if include else None)
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        text = await self._whole(request, job, pieces, answer)
        return JSONResponse(shape.whole(text, answer.finish_reason or "length", usage()))

    async def _first(
        self, request: Request, job: Job, pieces: asyncio.Queue
    ) -> tuple[str | None, BaseException | None]:
        """The first piece of a stream: what goes wrong before it still has a status of its own."""
        piece, error = await _or_left(request, job, pieces.get())
        if error is not None and not isinstance(error, OutOfTimeError):
            raise _as_api_error(error)
        return piece, error

    async def _whole(self, request: Request, job: Job, pieces: asyncio.Queue, answer: AnswerStream) -> str:
        async def collect() -> str:
            parts: list[str] = []
            while True:
                piece, error = await pieces.get()
                if error is not None and not isinstance(error, OutOfTimeError):
                    raise _as_api_error(error)
                if piece is None:
                    return "".join(parts)
                parts.append(piece)

        return await _or_left(request, job, collect())


async def _or_left(request: Request, job: Job, work: Any) -> Any:
    """What `work` gives; where the client leaves before, its place is freed."""

    async def left() -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(0.2)

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(left())]
    done = False
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done = tasks[0].done()
        if not done:
            raise ApiError(_CLOSED, "The client left")
        return tasks[0].result()
    finally:
        if not done:
            job.cancel()
        for task in tasks:
            task.cancel()


async def _events(
    job: Job,
    first: tuple[str | None, BaseException | None],
    pieces: asyncio.Queue,
    answer: AnswerStream,
    shape: "Shape",
    usage: Callable[[], dict[str, int]] | None,
) -> AsyncIterator[str]:
    """The chunks of a stream. The client's leaving ends this generator, which frees the place."""
    try:
        if shape.is_chat:
            yield _event(shape.chunk({"role": "assistant", "content": ""}, None))
        piece, error = first
        while piece is not None:
            if piece:
                yield _event(shape.chunk({"content": piece}, None))
            piece, error = await pieces.get()
        if error is not None and not isinstance(error, OutOfTimeError):
            yield _event(_as_api_error(error).to_json())
            return
        yield _event(shape.chunk({}, answer.finish_reason or "length"))
        if usage is not None:
            yield _event(shape.usage_chunk(usage()))
        yield "data: [DONE]\n\n"
    finally:
        job.cancel()


class Shape:
    """The objects of one kind of answer: "chat" or "text"."""

    def __init__(self, kind: str):
        self.is_chat = kind == "chat"
        self._head: dict[str, Any] = {}

    def begin(self, model: str) -> None:
        """Give it an id and a time."""
        name = ("chatcmpl-" if self.is_chat else "cmpl-") + uuid.uuid4().hex
        self._head = {"id": name, "created": int(time.time()), "model": model}

    def whole(self, text: str, reason: str, usage: dict[str, int]) -> dict[str, Any]:
        """An answer that is not streamed."""
        content = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
        return self._object(False) | {"choices": [choice], "usage": usage}

    def chunk(self, delta: dict[str, str], reason: str | None) -> dict[str, Any]:
        """A part of a stream."""
        content = {"delta": delta} if self.is_chat else {"text": delta.get("content", "")}
        return self._object(True) | {"choices": [{"index": 0, **content, "logprobs": None, "finish_reason": reason}]}

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """The last part, where it is asked for."""
        return self._object(True) | {"choices": [], "usage": usage}

    def _object(self, streamed: bool) -> dict[str, Any]:
        chat = "chat.completion.chunk" if streamed else "chat.completion"
        return self._head | {"object": chat if self.is_chat else "text_completion"}


def _usage(num_prompt: int, answer: AnswerStream) -> Callable[[], dict[str, int]]:
    return lambda: {
        "prompt_tokens": num_prompt,
        "completion_tokens": answer.num_tokens,
        "total_tokens": num_prompt + answer.num_tokens,
    }


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _refused_as_400(make: Callable[[], Any], param: str) -> Any:
    try:
        return make()
    except TilewrightError as error:
        first = error.problems[0]
        code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else "invalid_value"
        what = ": ".join(part for part in (first.what, first.got) if part)
        raise ApiError(400, what + (f"; {first.need}" if first.need else ""), param, code) from error


def _as_api_error(error: BaseException) -> ApiError:
    if isinstance(error, BusyError):
        return ApiError(429, "All places are taken; try again", code="too_many_requests", retry_after=1)
    if isinstance(error, StoppedError):
        return ApiError(503, "The server ends", code="server_stopping", retry_after=5)
    return ApiError(500, "The answer failed; the server's log says how", code="internal_error")


async def _refuse(request: Request, error: ApiError) -> Response:
    headers = {"retry-after": str(error.retry_after)} if error.retry_after else {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413):
        headers["connection"] = "close"  # the rest of the body is not read
    return JSONResponse(error.to_json(), error.status, headers)


async def _refuse_http(request: Request, error: HTTPException) -> Response:
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    what = f"{request.method} {request.url.path[:200]}: {error.detail}"
    headers = dict(error.headers or {})
    return JSONResponse(ApiError(error.status_code, what, code=code).to_json(), error.status_code, headers)
