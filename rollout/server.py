"""The HTTP front of a service: OpenAI's completions, and vLLM's routes for trainers. docs/serving.md lists them."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from moebius.rollout.batch import Prompt
from moebius.rollout.chat import render_chat
from moebius.rollout.errors import BadInput, MoebiusError
from moebius.rollout.server_admin import admin_routes
from moebius.rollout.server_errors import Gate, add_handlers, error_body, status_of
from moebius.rollout.server_format import Formatter, event
from moebius.rollout.server_metrics import Metrics
from moebius.rollout.server_types import ChatBody, CompletionBody
from moebius.rollout.server_weights import weight_routes
from moebius.rollout.service_types import Ticket

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from moebius.rollout.service import RolloutService, Stream

T = TypeVar("T")
CLIENT_GONE = 499  # of no consequence to the client: it has gone
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that has been checked."""

    tickets: list[Ticket]
    formatter: Formatter
    began: float


def make_app(service: RolloutService, *, model_name: str | None = None, token: str | None = None) -> FastAPI:
    """The application over a service, which it closes when it ends.

    Args:
        model_name: what /v1/models calls the model; None: as configured.
        token: bearer token that every request but /health must carry; None: none is asked for.
    """

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(title="Moebius Rollout", lifespan=life, docs_url=None, redoc_url=None)
    bodies = {"/v1/completions": list(CompletionBody.model_fields), "/v1/chat/completions": list(ChatBody.model_fields)}
    add_handlers(app, lambda path: bodies.get(path, []))
    front = _Front(service, model_name or service.group.config.engine.model, Metrics(service))
    front.add_routes(app)
    admin_routes(app, service, front.metrics)
    weight_routes(app, service)
    app.add_middleware(Gate, token=token)
    return app


class _Front:
    """The routes that sample."""

    def __init__(self, service: RolloutService, model: str, metrics: Metrics) -> None:
        self.service, self.model, self.metrics = service, model, metrics
        self._since = int(time.time())

    def add_routes(self, app: FastAPI) -> None:
        """Add them to the application."""
        errors: dict[int | str, dict[str, Any]] = {
            status: {"description": words}
            for status, words in {
                400: "The request is wrong.", 401: "No token, or a wrong one.", 404: "No such model.",
                413: "The body is too large.", 429: "Too much is waiting.", 503: "Nothing can be sampled.",
            }.items()
        }  # fmt: skip

        @app.post("/v1/completions", response_model=None, responses=errors)
        async def completions(body: CompletionBody, request: Request) -> Response:
            """Samples of one prompt or several."""
            return await self._serve(body, request)

        @app.post("/v1/chat/completions", response_model=None, responses=errors)
        async def chat_completions(body: ChatBody, request: Request) -> Response:
            """Samples of an assistant's next message."""
            return await self._serve(body, request)

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            """The model that is served."""
            limit = self.service.group.max_model_len
            entry = {"id": self.model, "object": "model", "created": self._since, "owned_by": "moebius"}
            return {"object": "list", "data": [entry | {"root": self._root, "max_model_len": limit}]}

    @property
    def _root(self) -> str:
        return self.service.group.config.engine.model

    async def _serve(self, body: CompletionBody | ChatBody, request: Request) -> Response:
        route = request.url.path
        try:
            response = await self._answer(body, request)
        except MoebiusError as error:
            self.metrics.answers.labels(route, status_of(error)).inc()
            raise
        self.metrics.answers.labels(route, response.status_code).inc()
        return response

    async def _answer(self, body: CompletionBody | ChatBody, request: Request) -> Response:
        began = time.monotonic()
        if body.model is not None and body.model not in (self.model, self._root):
            words = f"no model {body.model!r} is served here, only {self.model!r}"
            return JSONResponse(error_body(words, 404, "model", "model_not_found"), 404)
        # Tokenizers take their time with long texts.
        asked = await asyncio.to_thread(self._prepare, body, began)
        if body.stream:
            return _Events(self.service.stream(asked.tickets), self._events, asked)
        self.service.admit(asked.tickets)
        rollouts = await _unless_gone(request, asyncio.gather(*map(self.service.result, asked.tickets)))
        if rollouts is None:
            return Response(status_code=CLIENT_GONE)
        self.metrics.latency.observe(time.monotonic() - began)
        return JSONResponse(asked.formatter.answer(rollouts))

    def _prepare(self, body: CompletionBody | ChatBody, began: float) -> _Asked:
        """Raises BadInput."""
        prompts: Sequence[Prompt]
        if isinstance(body, ChatBody):
            given = body.sampling((body.top_logprobs or 0) if body.logprobs else None)
            if body.max_completion_tokens is not None:
                given["max_tokens"] = body.max_completion_tokens
            prompts, kind = [render_chat(body, self.service.group.tokenizer)], "chatcmpl"
        else:
            given, prompts, kind = body.sampling(body.logprobs), body.prompts, "cmpl"
        most = self.service.settings.max_pending
        if len(prompts) * body.n > most:
            raise BadInput(f"{len(prompts) * body.n} samples are more than this server takes at once ({most})")
        name = body.request_id or f"{kind}-{uuid.uuid4().hex}"
        tickets = []
        for i, prompt in enumerate(prompts):
            own = name if len(prompts) == 1 else f"{name}-{i}"
            try:
                tickets.append(self.service.prepare(prompt, given, n=body.n, request_id=own))
            except BadInput as error:
                raise BadInput(str(error).replace("prompt 0", f"prompt {i}", 1)) from error
        tokenizer = self.service.group.tokenizer if self.service.group.has_tokenizer else None
        formatter = Formatter(body, name, self.model, tokenizer, [ticket.prompt for ticket in tickets])
        return _Asked(tickets, formatter, began)

    async def _events(self, stream: Stream, asked: _Asked) -> AsyncIterator[str]:
        first = True
        try:
            async for prompt, delta in stream:
                if first and delta.token_ids:
                    self.metrics.first_token.observe(time.monotonic() - asked.began)
                    first = False
                told = asked.formatter.event(prompt, delta)
                if told is not None:
                    yield told
        except MoebiusError as error:  # the status has been sent
            yield event(error_body(str(error), status_of(error)))
        else:
            self.metrics.latency.observe(time.monotonic() - asked.began)
            last = asked.formatter.last_event()
            if last is not None:
                yield last
        yield event("[DONE]")


class _Events(StreamingResponse):
    """Server-sent events. Whatever ends them, what has not been sampled by then is aborted."""

    def __init__(self, stream: Stream, events: Any, asked: _Asked) -> None:
        super().__init__(events(stream, asked), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()


async def _unless_gone(request: Request, work: Awaitable[T]) -> T | None:
    """What `work` gives; None when the client disconnects before, which cancels it."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
