"""The HTTP application. Threads: one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from weft.aio import AsyncClient
from weft.channel import Security
from weft.data import ModelTokenizer
from weft.errors import InvalidArgument, WeftError
from weft.openai_front import sampling
from weft.openai_front.answers import Envelope, Json
from weft.openai_front.body_limit import BodyLimit
from weft.openai_front.errors import (
    describe,
    on_bad_request,
    on_http_error,
    on_weft_error,
)
from weft.openai_front.names import find_created, find_sampler, model_ids
from weft.openai_front.schema import ChatRequest, CompletionRequest, SamplingRequest
from weft.types import SampleOptions, ServerInfo

T = TypeVar("T")

MAX_CLIENTS = 64  # Connections to the server, one for each key.
_TOKEN_PREFIX = "weft_"  # Callers' keys with this prefix are server tokens.
_POLL_SECONDS = 0.5  # The interval at which a call checks for a disconnect.


class Front:
    """Connections to the server, one per key.

    security: the credentials of all connections. If they have no token, a caller's key
    that starts with "weft_" is the token.
    """

    def __init__(
        self, target: str, tokenizer: ModelTokenizer, security: Security
    ) -> None:
        self.tokenizer = tokenizer
        self._target = target
        self._security = security
        self._clients: dict[str | None, AsyncClient] = {}
        self._info: ServerInfo | None = None

    async def client(self, request: Request) -> AsyncClient:
        """Returns the connection for the caller's key."""
        token = self._security.token
        if token is None:
            kind, _, key = request.headers.get("authorization", "").partition(" ")
            if kind.lower() == "bearer" and key.startswith(_TOKEN_PREFIX):
                token = key
        client = self._clients.pop(token, None)
        if client is None:
            security = dataclasses.replace(self._security, token=token)
            client = AsyncClient(self._target, security=security)
        self._clients[token] = client  # Keeps the dict in order of use.
        if len(self._clients) > MAX_CLIENTS:
            # Calls in flight keep the dropped connection open until they end.
            del self._clients[next(iter(self._clients))]
        return client

    async def info(self, client: AsyncClient) -> ServerInfo:
        """Returns the server's info. Fetches it once: the model stays the same."""
        if self._info is None:
            self._info = await client.info()
        return self._info

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()


def make_app(front: Front, max_body_bytes: int) -> FastAPI:
    """Returns the application. At its shutdown the application closes the front."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await front.close()

    # Serves no API pages, because they would load scripts from other sites.
    app = FastAPI(title="Weft", lifespan=lifespan, openapi_url=None)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_exception_handler(WeftError, on_weft_error)
    app.add_exception_handler(RequestValidationError, on_bad_request)
    app.add_exception_handler(HTTPException, on_http_error)

    @app.get("/health")
    async def health(request: Request) -> Response:
        client = await front.client(request)
        return Response(status_code=200 if await client.healthy() else 503)

    @app.get("/v1/models")
    async def models(request: Request) -> Json:
        names = await model_ids(await front.client(request))
        entries = [_model(name, created) for name, created in names.items()]
        return {"object": "list", "data": entries}

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> Json:
        client = await front.client(request)
        base = (await front.info(client)).model.name
        return _model(name, await find_created(client, base, name))

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _serve(await _completion(front, body, request), body, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await _serve(await _chat(front, body, request), body, request)

    return app


def _model(name: str, created: int) -> Json:
    return {"id": name, "object": "model", "created": created, "owned_by": "weft"}


def _options(body: SamplingRequest, top: int) -> SampleOptions:
    stop: list[Any] = [*body.stops(), *body.stop_token_ids]
    return {
        "num_samples": body.n,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "top_k": body.top_k,
        "seed": body.seed,
        "stop": stop or None,
        "top_logprobs": top,
    }


async def _job(front: Front, body: SamplingRequest, request: Request) -> dict[str, Any]:
    """Returns the fields of a Job that do not depend on the kind of request."""
    client = await front.client(request)
    info = await front.info(client)
    options = body.stream_options
    return {
        "tokenizer": front.tokenizer,
        "sampler": await find_sampler(client, info.model.name, body.model),
        "stops": body.stops(),
        "num_samples": body.n,
        "usage_in_stream": options is not None and options.include_usage,
    }


async def _completion(
    front: Front, body: CompletionRequest, request: Request
) -> sampling.Job:
    prompts = [
        front.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        for prompt in body.prompts()
    ]
    if not all(prompts) or not prompts:
        raise InvalidArgument("prompt has no tokens, must have at least one")
    options = _options(body, top=body.logprobs or 0)
    # The server draws at least one token. If max_tokens is 0, the answer leaves out
    # the drawn tokens.
    options["max_tokens"] = 16 if body.max_tokens is None else max(1, body.max_tokens)
    if body.echo and body.logprobs is not None:
        options["prompt_logprobs"] = True
        options["prompt_top_logprobs"] = body.logprobs
    return sampling.Job(
        **await _job(front, body, request),
        envelope=Envelope("text_completion", body.model),
        prompts=prompts,
        options=options,
        chat=False,
        scored=body.logprobs is not None,
        echo=body.echo,
        keep_answer=body.max_tokens != 0,
    )


async def _chat(front: Front, body: ChatRequest, request: Request) -> sampling.Job:
    prompt = front.tokenizer.chat_prompt(body.messages)
    options = _options(body, top=body.top_logprobs or 0)
    most = body.max_completion_tokens or body.max_tokens
    if most is None:
        info = await front.info(await front.client(request))
        most = max(1, info.model.context_length - len(prompt))
    options["max_tokens"] = most
    return sampling.Job(
        **await _job(front, body, request),
        envelope=Envelope("chat.completion", body.model),
        prompts=[prompt],
        options=options,
        chat=True,
        scored=bool(body.logprobs),
    )


async def _serve(
    job: sampling.Job, body: SamplingRequest, request: Request
) -> Response:
    if not body.stream:
        return JSONResponse(await _while_connected(request, sampling.answer(job)))
    events = sampling.stream(job)
    # A refusal arrives in place of the first sampled token. In a chat, a role event for
    # each sample comes before that token.
    count = (job.num_samples if job.chat else 0) + 1
    early = await _while_connected(request, _first(events, count))

    async def rest() -> AsyncIterator[str]:
        for event in early:
            yield event
        try:
            async for event in events:
                yield event
        except WeftError as error:
            yield sampling.line(describe(error)[1])

    return StreamingResponse(rest(), media_type="text/event-stream")


async def _first(events: AsyncIterator[str], count: int) -> list[str]:
    return [await anext(events) for _ in range(count)]


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """Returns the result of `work`. Cancels `work` if the client disconnects."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=_POLL_SECONDS))[0]:
            if await request.is_disconnected():
                raise InvalidArgument("the client has left")
        return await task
    finally:
        task.cancel()
