"""The HTTP side: OpenAI's `/v1/chat/completions`, `/v1/completions`, `/v1/models`, and `/health`.

Answers are drawn by `worker.Worker`; here requests are read within limits, checked, and their answers written.
Everything wrong with a request is a status 4xx with OpenAI's error object.
"""

import asyncio
import hmac
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tilewright.core.web_origin import own_names, why_not
from tilewright.serving.api.client_objects import Shape
from tilewright.serving.api.errors import ApiError
from tilewright.serving.api.logprobs import TokenTexts
from tilewright.serving.api.prompts import Prompt, chat_prompt, refused_as_400, text_prompts
from tilewright.serving.api.reply import CLOSED, Reply, ReplyPart
from tilewright.serving.api.requests import ApiRequest, ChatRequest, TextRequest, parse
from tilewright.serving.api.thoughts import THOUGHT_MARKS, ThoughtParser
from tilewright.serving.api.tool_calls import TOKENS, CallParser
from tilewright.serving.grammar import Grammars
from tilewright.serving.next_token import AnswerSettings
from tilewright.serving.session import Session
from tilewright.serving.token_text import ThoughtGate
from tilewright.serving.worker import Worker

_USUAL_TOKENS = 2048
"""Of an answer, where neither the request nor the server says a limit."""
_MOST_TOKENS = 32768
"""The same where nothing says how many positions the model has."""
_DRAINED = 8
"""Times the limit of a body that is read and dropped, so that a client that still sends gets to read the refusal."""


@dataclass(frozen=True)
class Limits:
    """Limits of one request, and of all together.

    Args:
        concurrent: answers that are drawn at the same time.
        waiting: answers that wait beside them; requests for more get status 429.
        max_tokens: of an answer; a request that asks for more is refused, one that asks for none gets these. None: the
            model's context, and 2048 for a request that asks for none.
        seconds: from a request to the end of its answer.
        body_bytes: of a request.
        body_seconds: until a request's body is there.
    """

    concurrent: int = 8
    waiting: int = 32
    max_tokens: int | None = None
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
        """One request to the HTTP app, checked for its host."""
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
        self.grammars = Grammars(session.tokenizer, session.stop_ids)
        self._texts = TokenTexts(session.tokenizer)
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
        return await self._answer(request, asked, "chat", lambda: [chat_prompt(self.session, self.grammars, asked)])

    async def _text(self, request: Request) -> Response:
        asked: TextRequest = await self._read(request, TextRequest)
        return await self._answer(request, asked, "text", lambda: text_prompts(self.session, asked))

    async def _read(self, request: Request, kind: type[Any]) -> Any:
        self._check_key(request)
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":  # which no web page can send here without being asked first
            raise ApiError(415, "The content-type must be application/json", code="unsupported_media_type")
        asked = parse(await self._body(request), kind)
        self._check_name(asked.model)
        tokens, field = asked.asked_tokens()
        if (tokens or 0) > self._most_tokens:
            what = f"{field}: this server draws at most {self._most_tokens} tokens per answer"
            raise ApiError(400, what, field, "invalid_value")
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
            raise ApiError(CLOSED, "The client left") from None
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

    async def _answer(
        self, request: Request, asked: ApiRequest, shape: str, prepare: Callable[[], Sequence[Prompt]]
    ) -> Response:
        prompts = await asyncio.to_thread(prepare)
        parts = await asyncio.to_thread(self._parts, asked, prompts, shape == "chat")
        texts = None if asked.num_top() is None else self._texts
        objects = Shape(shape, self.name, texts)
        num_prompt = sum(len(prompt.ids) for prompt in prompts)
        reply = Reply(request, self.worker, parts, objects, self.limits.seconds, num_prompt)
        if not asked.stream:
            return await reply.whole()
        return await reply.stream(bool(asked.stream_options and asked.stream_options.include_usage))

    def _parts(self, asked: ApiRequest, prompts: Sequence[Prompt], is_chat: bool) -> list[ReplyPart]:
        """Divide an HTTP request into its answers, `n` for each prompt."""
        choices = asked.n or 1
        most = self.worker.concurrent + self.worker.waiting
        if choices * len(prompts) > most:
            raise ApiError(400, f"This server draws at most {most} answers per request", "n", "invalid_value")
        if any(token >= self.session.tokenizer.vocab_size for token in asked.biases()):
            what = f"logit_bias: ids must be from 0 to {self.session.tokenizer.vocab_size - 1}"
            raise ApiError(400, what, "logit_bias", "invalid_value")
        return [self._part(asked, prompt, i, is_chat) for prompt in prompts for i in range(choices)]

    def _part(self, asked: ApiRequest, prompt: Prompt, choice: int, is_chat: bool) -> ReplyPart:
        settings = AnswerSettings(
            self._num_tokens(asked, len(prompt.ids)),
            asked.sampling(),
            asked.stops(),
            None if asked.seed is None else (asked.seed + choice + 2**63) % 2**64 - 2**63,
            asked.frequency_penalty or 0.0,
            asked.presence_penalty or 0.0,
            asked.biases(),
            asked.num_top(),
        )
        calls = prompt.calls
        keep = () if calls is None else TOKENS[calls.kind]
        keep += () if prompt.thoughts is None else THOUGHT_MARKS
        constraint = prompt.constraint() if prompt.constraint is not None else None
        gate = None if prompt.thoughts is None else ThoughtGate(THOUGHT_MARKS, prompt.thoughts)
        answer = refused_as_400(
            lambda: self.session.answer(
                prompt.ids, settings, turn=is_chat, constraint=constraint, keep=keep, gate=gate
            ),
            "messages" if is_chat else "prompt",
        )
        parser = None if calls is None else CallParser(calls.kind, calls.names, calls.schemas)
        one_call = calls is not None and calls.only_one
        thoughts = None if prompt.thoughts is None else ThoughtParser(prompt.thoughts)
        return ReplyPart(answer, prompt.prefix, parser, one_call, asked.num_top() is not None, thoughts)

    def _num_tokens(self, asked: ApiRequest, num_prompt: int) -> int:
        """Limit the tokens of an answer: as many as the HTTP request wants, else as the server gives and memory has
        room for."""
        tokens, field = asked.asked_tokens()
        most = self.worker.draws.most_positions
        room = self.session.max_positions
        needed = (tokens or 1) if room is None else max(1, min(tokens or 1, room - num_prompt))
        if most is not None and num_prompt + needed > most:
            what = f"The server has memory for {most} tokens of prompt and answer, not for {num_prompt} + {needed}"
            raise ApiError(400, what, field if tokens else None, "context_length_exceeded")
        if tokens is not None:
            return tokens
        usual = self.limits.max_tokens or min(_USUAL_TOKENS, self._most_tokens)
        return usual if most is None else min(usual, most - num_prompt)

    @property
    def _most_tokens(self) -> int:
        return self.limits.max_tokens or self.session.max_positions or _MOST_TOKENS


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
