"""The HTTP application. Threads: one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.aio import AsyncClient
from weft.channel import Security
from weft.data import ModelTokenizer
from weft.errors import (
    InvalidArgument,
    NotFound,
    Unauthenticated,
    Unavailable,
    WeftError,
)
from weft.openai_front import sampling
from weft.openai_front.answers import Envelope, Json
from weft.openai_front.errors import (
    body_of,
    describe,
    on_bad_request,
    on_http_error,
    on_weft_error,
)
from weft.openai_front.hosts import HostCheck
from weft.openai_front.intake import Intake
from weft.openai_front.metrics import Metrics
from weft.openai_front.names import (
    find_created,
    find_weights,
    is_base,
    is_of_tinker,
    model_ids,
)
from weft.openai_front.schema import ChatRequest, CompletionRequest, SamplingRequest
from weft.openai_front.tinker import TinkerPort
from weft.openai_front.trace import REQUEST_ID, RequestIds
from weft.retry import NO_RETRY, RetryPolicy
from weft.types import ALL_THAT_FIT, SampleOptions, ServerInfo

T = TypeVar("T")

MAX_CLIENTS = 64  # Connections to the server, one for each key.
INFO_SECONDS = 1.0  # A key that the server has refused meanwhile counts so long.
# A server that does not say within this time what it runs is not there.
ANSWER_SECONDS = 1.5
# The server's tokenizer may have 20 MB.
TOKENIZER_SECONDS = 30.0
# A caller of a server that is gone learns it within two seconds.
_RETRY = RetryPolicy(max_attempts=3)
# Callers' keys of this form are server tokens, also in the form of the Tinker API.
_TOKEN = re.compile(r"(?i:bearer) +(?:tml-)?(weft_[!-~]{1,400}) *")
NAMES_SECONDS = 60.0  # Further names of the base model are asked for so often.
_POLL_SECONDS = 0.5  # The interval at which a call checks for a disconnect.
# The second prefix is that of Tinker's own endpoint for clients of OpenAI's API.
PREFIXES = ("/v1", "/oai/api/v1")
# A refusal within this time sets the status of a stream. Then the stream begins, and
# has a comment at this interval until its first token, because proxies close silent
# connections, most after 60 s.
STATUS_SECONDS = 2.0
COMMENT_SECONDS = 15.0


@dataclasses.dataclass
class _Caller:
    """A key's connection, and the server's last answer to the key."""

    client: AsyncClient
    info: asyncio.Task[ServerInfo] | None = None
    asked_at: float = -math.inf  # By time.monotonic().


class Front:
    """Connections to the server, one per key.

    own: the tokenizer to use in place of the server's; None: the server's. security:
    the credentials of all connections. If they have no token, a caller's key that
    starts with "weft_" is the token. tinker: where further names of the base model and
    a list of paths come from; None: there are none. Raises what `Security.check`
    raises.
    """

    def __init__(
        self,
        target: str,
        own: ModelTokenizer | None,
        security: Security,
        tinker: TinkerPort | None = None,
    ) -> None:
        self._tinker = tinker
        self._names: list[str] = []
        self._names_until = -math.inf
        self._own = own
        self._tokenizer: ModelTokenizer | None = None
        self._fingerprint = ""  # Of the server's tokenizer when it was got.
        self._getting = asyncio.Lock()
        self._target = target
        self._security = security
        self._callers: dict[str | None, _Caller] = {}
        self._probe = AsyncClient(
            target, timeout=ANSWER_SECONDS, retry=NO_RETRY, security=security
        )

    def _token(self, request: Request) -> str | None:
        if self._security.token is not None:
            return self._security.token
        match = _TOKEN.fullmatch(request.headers.get("authorization", ""))
        return match[1] if match else None

    def _caller(self, request: Request) -> _Caller:
        token = self._token(request)
        caller = self._callers.pop(token, None)
        if caller is None:
            security = dataclasses.replace(self._security, token=token)
            caller = _Caller(AsyncClient(self._target, retry=_RETRY, security=security))
        self._callers[token] = caller  # Keeps the dict in order of use.
        if len(self._callers) > MAX_CLIENTS:
            # Calls in flight keep the dropped connection open until they end.
            del self._callers[next(iter(self._callers))]
        return caller

    def client(self, request: Request) -> AsyncClient:
        """Returns the connection for the caller's key."""
        return self._caller(request).client

    async def tokenizer(self, request: Request) -> ModelTokenizer:
        """Returns the tokenizer. The first caller's key gets it from the server, or
        checks that the front's own fits the server's model."""
        now = (await self.info(request)).model.tokenizer_fingerprint
        async with self.limit(TOKENIZER_SECONDS), self._getting:
            # The server may have started again with another base model.
            if self._tokenizer is None or self._fingerprint != now:
                self._tokenizer = await self.client(request).tokenizer(self._own)
                self._fingerprint = now
        return self._tokenizer

    async def info(self, request: Request, *, renew: bool = False) -> ServerInfo:
        """Returns the server's info, which is at most INFO_SECONDS old. So it also
        checks the caller's key, and raises Unauthenticated if the server does not
        know the key, and Unavailable if the server takes no work. Callers with the
        same key share a call. renew: makes a call."""
        caller = self._caller(request)
        now = time.monotonic()
        if caller.info is None or renew or now - caller.asked_at > INFO_SECONDS:
            caller.asked_at = now
            caller.info = asyncio.ensure_future(self._ask(caller.client))
        try:
            return await asyncio.shield(caller.info)
        except WeftError as error:
            caller.info = None
            if isinstance(error, Unauthenticated):
                # Wrong keys take no places of good ones.
                token = self._token(request)
                self._callers.pop(token, None)
                if token is None and "authorization" in request.headers:
                    text = "the API key is no token of this server: use weft_..."
                    raise Unauthenticated(text) from None
            raise

    async def _ask(self, client: AsyncClient) -> ServerInfo:
        async with self.limit(ANSWER_SECONDS):
            info = await client.info()
        if info.draining:
            raise self._unavailable("is draining")
        if info.model.context_length == 0:
            raise self._unavailable("is starting")
        return info

    @contextlib.asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[None]:
        """Raises Unavailable if what runs inside takes longer."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            text = f"has not answered for {seconds:g} s"
            raise self._unavailable(text) from None

    def _unavailable(self, why: str) -> Unavailable:
        error = Unavailable(f"weftd at {self._target} {why}; try again")
        error.retry_after = INFO_SECONDS
        return error

    async def find(
        self,
        request: Request,
        model: str,
        look: Callable[[AsyncClient, str, str], Awaitable[T]],
    ) -> T:
        """Returns what look(client, name of the base model, model) finds. Raises
        NotFound if there is no such model, and Unavailable if the server does not
        answer in time."""
        client = self.client(request)
        async with self.limit(ANSWER_SECONDS):
            base = (await self.info(request)).model.name
            if model in await self._base_names(request):
                return await look(client, base, base)
            try:
                return await look(client, base, model)
            except NotFound:
                # The server may have started again with another base model.
                info = (await self.info(request, renew=True)).model
                if info.name != base:
                    return await look(client, info.name, model)
                names = [base, *await self._base_names(request)]
                if not is_base(model, names, info.context_length):
                    raise
                return await look(client, base, base)

    async def _base_names(self, request: Request) -> list[str]:
        """Returns what clients of the Tinker API call the base model, as it was at most
        NAMES_SECONDS ago."""
        if self._tinker is None:
            return []
        if time.monotonic() >= self._names_until:
            with contextlib.suppress(Unavailable):  # Other names serve meanwhile.
                self._names = await self._tinker.base_names(self._token(request))
            self._names_until = time.monotonic() + NAMES_SECONDS
        return self._names

    async def models(self, request: Request) -> dict[str, int]:
        """Returns the names that the caller may use, with Unix times of creation. With
        the Tinker API, models and samplers of its clients have its paths."""
        await self.info(request)
        async with self.limit(ANSWER_SECONDS):
            names = await model_ids(self.client(request))
            if self._tinker is None:
                return names
            token = self._token(request)
            aliases = dict.fromkeys(await self._base_names(request), 0)
            own = {name: t for name, t in names.items() if not is_of_tinker(name)}
            return {**aliases, **own, **await self._tinker.sampler_paths(token)}

    async def serves(self) -> bool:
        """Returns whether the server takes work, as far as it says so without a key. A
        server with tokens says only that it needs one."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                if await self._probe.healthy():
                    return True
                await self._probe.info()
        except Unauthenticated:
            return True
        except (WeftError, TimeoutError):
            return False
        return False

    async def close(self) -> None:
        for client in (self._probe, *(c.client for c in self._callers.values())):
            await client.close()
        if self._tinker is not None:
            await self._tinker.close()


def make_app(
    front: Front,
    max_body_bytes: int,
    allowed_hosts: Collection[str] = (),
    allowed_origins: Collection[str] = (),
) -> ASGIApp:
    """Returns the application. At its shutdown the application closes the front.

    allowed_hosts, allowed_origins: hosts.py describes them.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await front.close()

    # Serves no API pages, because they would load scripts from other sites.
    app = FastAPI(title="Weft", lifespan=lifespan, openapi_url=None)
    app.add_exception_handler(WeftError, on_weft_error)
    app.add_exception_handler(RequestValidationError, on_bad_request)
    app.add_exception_handler(HTTPException, on_http_error)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if await front.serves() else 503)

    for prefix in PREFIXES:
        app.include_router(_routes(front), prefix=prefix)

    served: ASGIApp = Intake(app, max_body_bytes, front.info)
    if allowed_origins:
        served = CORSMiddleware(
            served,
            allow_origins=allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After", REQUEST_ID],
        )
    counted = Metrics(served)
    return RequestIds(HostCheck(counted, allowed_hosts, allowed_origins))


def _routes(front: Front) -> APIRouter:
    router = APIRouter()

    @router.get("")
    async def paths() -> Json:
        return {"paths": ["/models", "/completions", "/chat/completions"]}

    @router.get("/models")
    async def models(request: Request) -> Json:
        names = await front.models(request)
        entries = [_model(name, created) for name, created in names.items()]
        return {"object": "list", "data": entries}

    @router.get("/models/{name:path}")
    async def model(name: str, request: Request) -> Json:
        return _model(name, await front.find(request, name, find_created))

    @router.post("/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        job = await _while_connected(request, _completion(front, body, request))
        return await _serve(job, body, request)

    @router.post("/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        job = await _while_connected(request, _chat(front, body, request))
        return await _serve(job, body, request)

    return router


def _model(name: str, created: int) -> Json:
    return {"id": name, "object": "model", "created": created, "owned_by": "weft"}


def _options(body: SamplingRequest, top: int) -> SampleOptions:
    stop: list[Any] = [*body.stops(), *body.stop_token_ids]
    return {
        "num_samples": body.n,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "top_k": max(0, body.top_k),
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty or 0,
        "frequency_penalty": body.frequency_penalty or 0,
        "logit_bias": body.token_biases(),
        "allowed_token_ids": body.allowed_token_ids,
        "min_tokens": body.min_tokens,
        "seed": body.seed,
        "stop": stop or None,
        "top_logprobs": top,
    }


async def _job(front: Front, body: SamplingRequest, request: Request) -> dict[str, Any]:
    """Returns the fields of a Job that do not depend on the kind of request."""
    options = body.stream_options
    return {
        "tokenizer": await front.tokenizer(request),
        "weights": await front.find(request, body.model, find_weights),
        "stops": body.stops(),
        "num_samples": body.n,
        "usage_in_stream": options is not None and options.include_usage,
    }


async def _completion(
    front: Front, body: CompletionRequest, request: Request
) -> sampling.Job:
    tokenizer = await front.tokenizer(request)
    # Other requests go on while a thread tokenizes a long text.
    prompts = [
        await asyncio.to_thread(tokenizer.encode, prompt)
        if isinstance(prompt, str)
        else prompt
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
    tokenizer = await front.tokenizer(request)
    prompt = await asyncio.to_thread(
        tokenizer.chat_prompt, body.messages, switches=body.chat_template_kwargs
    )
    options = _options(body, top=body.top_logprobs or 0)
    options["max_tokens"] = (
        body.max_completion_tokens or body.max_tokens or ALL_THAT_FIT
    )
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
        blocks = await _while_connected(request, sampling.answer(job))
        return _whole(blocks)
    events = sampling.stream(job)
    # A refusal arrives in place of the first sampled token. In a chat, a role event for
    # each sample comes before that token.
    count = (job.num_samples if job.chat else 0) + 1
    early = asyncio.ensure_future(_first(events, count))
    try:
        await _while_connected(request, asyncio.wait({early}, timeout=STATUS_SECONDS))
        if early.done():
            early.result()
    except BaseException:
        early.cancel()
        raise
    return _Stream(early, events)


class _Stream(StreamingResponse):
    """An answer whose work ends with it, also if the client leaves before a line."""

    def __init__(
        self, early: asyncio.Future[list[str]], events: AsyncIterator[str]
    ) -> None:
        super().__init__(_lines(early, events), media_type="text/event-stream")
        self._early = early

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._early.cancel()


async def _lines(
    early: asyncio.Future[list[str]], events: AsyncIterator[str]
) -> AsyncIterator[str]:
    """Yields the lines of a stream: the first ones when they are there, then the rest.
    An error becomes an event."""
    try:
        while not early.done():
            yield ": waiting\n\n"
            await asyncio.wait({early}, timeout=COMMENT_SECONDS)
        for event in early.result():
            yield event
        async for event in events:
            yield event
    except WeftError as error:
        yield sampling.line(describe(error)[1])
    except asyncio.CancelledError:
        # The time for a stop is over, or the client has left and reads nothing.
        text = "the front stops: send the request again"
        yield sampling.line(body_of(text, "server_error"))


def _whole(blocks: list[bytes]) -> Response:
    """Returns an answer. A long one is sent block by block, because in one piece it
    would be copied while all other callers wait."""
    if len(blocks) == 1:
        return Response(blocks[0], media_type="application/json")

    async def parts() -> AsyncIterator[bytes]:
        for block in blocks:
            yield block

    head = {"Content-Length": str(sum(map(len, blocks)))}
    return StreamingResponse(parts(), media_type="application/json", headers=head)


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
