"""From answers that the worker draws to what a client gets: one object, or the parts of a stream.

A client that leaves frees the places of its answers, whichever it asked for.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tilewright.serving.answer import AnswerPiece, AnswerStream
from tilewright.serving.api.client_objects import Shape, Told, event
from tilewright.serving.api.errors import ApiError
from tilewright.serving.api.thoughts import ThoughtParser
from tilewright.serving.api.tool_calls import CallParser, FunctionCall, Said
from tilewright.serving.grammar import GrammarError
from tilewright.serving.next_token import Drawn
from tilewright.serving.worker import BusyError, Job, OutOfTimeError, StoppedError, Worker

CLOSED = 499
"""Status that proxies log where the client left; no client reads it."""
_Item = tuple[int, AnswerPiece | None, BaseException | None]


@dataclass
class ReplyPart:
    """One answer of a request.

    Args:
        answer: to be drawn.
        prefix: text before it, which is told with it.
        parser: finds calls of tools; None: there are none.
        one_call: the answer ends with its first call.
        thoughts: tells them apart; None: there are none.
        tells_tokens: whether log-probabilities are told.
    """

    answer: AnswerStream
    prefix: str = ""
    parser: CallParser | None = None
    one_call: bool = False
    tells_tokens: bool = False
    thoughts: ThoughtParser | None = None


@dataclass
class News:
    """Change of an answer by a piece."""

    text: str
    calls: list[FunctionCall]
    tokens: list[Drawn]
    thought: str = ""


class Reply:
    """The answers of one request.

    Args:
        request: of the client.
        worker: draws.
        parts: the answers, in the order of their indices.
        shape: of the objects.
        seconds: until they must be there.
        num_prompt: tokens of the prompts.
    """

    def __init__(
        self,
        request: Request,
        worker: Worker,
        parts: Sequence[ReplyPart],
        shape: Shape,
        seconds: float,
        num_prompt: int,
    ):
        self._request, self._parts, self._shape, self._num_prompt = request, parts, shape, num_prompt
        self._items: asyncio.Queue[_Item] = asyncio.Queue()
        self._choices = [Told(i) for i in range(len(parts))]
        self._open = set(range(len(parts)))
        self._jobs = [Job(part.answer, self._emit(i), seconds) for i, part in enumerate(parts)]
        try:
            worker.submit(*self._jobs)
        except (BusyError, StoppedError) as error:
            raise as_api_error(error) from None

    async def whole(self) -> Response:
        """The whole reply, one object, when all answers have ended."""

        async def collect() -> None:
            while self._open:
                index, news = self._take(await self._items.get())
                self._keep(index, news)

        await self._or_left(collect())
        return JSONResponse(self._shape.whole(self._choices, self._usage()))

    async def stream(self, include_usage: bool) -> Response:
        """The reply as a stream of parts. What goes wrong before the first still has a status of its own."""
        first = await self._or_left(self._items.get())
        if first[2] is not None and not isinstance(first[2], OutOfTimeError):
            self._cancel()
            raise as_api_error(first[2])
        events = self._events(first, include_usage)
        return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})

    async def _events(self, item: _Item, include_usage: bool) -> AsyncIterator[str]:
        try:
            if self._shape.is_chat:
                for choice in self._choices:
                    yield event(self._shape.role(choice.index))
            while True:
                try:
                    index, news = self._take(item)
                except ApiError as error:
                    yield event(error.to_json())
                    return
                choice = self._choices[index]
                for part in self._shape.parts(choice, news.thought, news.text, news.calls, news.tokens):
                    yield event(part)
                self._keep(index, news)
                if index not in self._open and choice.reason:
                    yield event(self._shape.last(choice))
                if not self._open:
                    break
                item = await self._items.get()
            if include_usage:
                yield event(self._shape.usage(self._usage()))
            yield "data: [DONE]\n\n"
        finally:
            self._cancel()

    def _take(self, item: _Item) -> tuple[int, News]:
        """Take an item into the reply: change by it, and of which answer; an answer that it ends is closed."""
        index, piece, error = item
        if error is not None and not isinstance(error, OutOfTimeError):
            self._cancel()
            raise as_api_error(error)
        part, choice = self._parts[index], self._choices[index]
        if index not in self._open:  # it was ended by its first call
            choice.reason, news = None, News("", [], [])
            return index, news
        thought, said = self._said(part, piece)
        if part.one_call and said.calls:
            said.calls = said.calls[:1]
            self._jobs[index].cancel()
            piece = None
        if piece is None:
            self._open.discard(index)
            calls, ended = bool(choice.calls or said.calls), part.answer.finish_reason
            # Cut off behind a whole call another one may be missing.
            told = calls and (part.one_call or ended != "length")
            choice.reason = "tool_calls" if told else ended or "length"
        prefix, part.prefix = part.prefix, ""
        tokens = [piece.token] if part.tells_tokens and piece is not None and piece.token is not None else []
        return index, News(prefix + said.text, said.calls, tokens, thought)

    def _said(self, part: ReplyPart, piece: AnswerPiece | None) -> tuple[str, Said]:
        """Parts of the reply that a piece of an answer, or its end, adds: thoughts, text and calls."""
        thought, text = "", "" if piece is None else piece.text
        if part.thoughts is not None:
            found = part.thoughts.flush() if piece is None else part.thoughts.push(text)
            thought, text = found.thought, found.text
        if part.parser is None:
            return thought, Said(text)
        said = part.parser.push(text)
        if piece is None:
            last = part.parser.flush()
            said = Said(said.text + last.text, said.calls + last.calls)
        return thought, said

    def _keep(self, index: int, news: News) -> None:
        choice = self._choices[index]
        choice.text += news.text
        choice.thought += news.thought
        choice.calls += news.calls
        choice.tokens += news.tokens

    def _emit(self, index: int) -> Any:
        loop = asyncio.get_running_loop()

        def emit(piece: AnswerPiece | None, error: BaseException | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._items.put_nowait, (index, piece, error))

        return emit

    def _cancel(self) -> None:
        for job in self._jobs:
            job.cancel()

    def _usage(self) -> dict[str, int]:
        drawn = sum(part.answer.num_tokens for part in self._parts)
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": drawn,
            "total_tokens": self._num_prompt + drawn,
        }

    async def _or_left(self, work: Any) -> Any:
        """A reply, or a client that left: the result of `work`; where it leaves before, its places are freed."""

        async def left() -> None:
            while (await self._request.receive())["type"] != "http.disconnect":
                pass

        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(left())]
        done = False
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done = tasks[0].done()
            if not done:
                raise ApiError(CLOSED, "The client left")
            return tasks[0].result()
        finally:
            if not done:
                self._cancel()
            for task in tasks:
                task.cancel()


def as_api_error(error: BaseException) -> ApiError:
    """Turn an error of the worker into the reply that the client gets."""
    if isinstance(error, BusyError):
        return ApiError(429, "All places are taken; try again", code="too_many_requests", retry_after=1)
    if isinstance(error, StoppedError):
        return ApiError(503, "The server ends", code="server_stopping", retry_after=5)
    if isinstance(error, GrammarError):
        return ApiError(400, f"The schema cannot be followed: {error}", "response_format", "invalid_value")
    return ApiError(500, "The answer failed; the server's log says how", code="internal_error")
