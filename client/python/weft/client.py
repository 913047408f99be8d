"""The synchronous client. Threads: any; each call may block its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Unpack

from weft.adapter import Adapter
from weft.channel import Security
from weft.core import ClientCore
from weft.datum import Datum
from weft.folders import StrPath
from weft.operations import Caller
from weft.retry import RetryPolicy
from weft.sampling import InFlight
from weft.threads import ThreadDriver
from weft.types import (
    AdapterInfo,
    ArrayLike,
    CheckpointInfo,
    FloatArray,
    LossOptions,
    SampleDelta,
    SampleOptions,
    SampleResult,
    ServerInfo,
    TrainResult,
)


class BaseSubmit:
    """The base model's calls that return at once, so that several can be in flight."""

    def __init__(self, core: ClientCore, driver: ThreadDriver) -> None:
        self._core = core
        self._driver = driver

    def sample(
        self, prompt: ArrayLike, **options: Unpack[SampleOptions]
    ) -> Future[SampleResult]:
        """Samples from the base model. prompt: [P] token ids, 1 <= P < context."""
        return self._driver.submit(self._core.sampler.sample(prompt, options))

    def forward(
        self,
        data: Iterable[Datum],
        loss: str = "cross_entropy",
        **options: Unpack[LossOptions],
    ) -> Future[TrainResult]:
        """Scores with the base model; results in the data's order."""
        return self._driver.submit(self._core.forward(data, loss, options))


class Client:
    """A connection to one server. Also a context manager.

    timeout: seconds for each call, repetitions included.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        timeout: float = 600.0,
        retry: RetryPolicy = RetryPolicy(),
        security: Security | None = None,
    ) -> None:
        if security is None:
            security = Security.from_environment()
        self._driver = ThreadDriver(target, security)
        self._core = ClientCore(Caller(timeout, retry))
        self.submit = BaseSubmit(self._core, self._driver)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection and the calls in flight; later ones raise
        FailedPrecondition."""
        self._core.caller.close()
        self._driver.close()

    def info(self) -> ServerInfo:
        """What the server runs and what it accepts."""
        return self._driver.run(self._core.info())

    def healthy(self) -> bool:
        """Whether the server takes work now. Never raises a WeftError."""
        return self._driver.run(self._core.healthy())

    def drain(self) -> None:
        """Lets the server finish what it accepted and take nothing new."""
        self._driver.run(self._core.drain())

    def create_adapter(
        self,
        adapter_id: str,
        *,
        rank: int = 32,
        alpha: float = 32.0,
        target_modules: Iterable[str] | None = None,
        seed: int | None = None,
        tenant: str | None = None,
    ) -> Adapter:
        """Makes a new adapter.

        target_modules: "q_proj", ... "down_proj", "lm_head", "embed_tokens"; None:
        the server's default. tenant: with whose other adapters it shares; None: a
        tenant of its own. AlreadyExists where the name is taken.
        """
        operation = self._core.create_adapter(
            adapter_id, rank, alpha, target_modules, seed, tenant
        )
        return Adapter(self._driver.run(operation), self._driver)

    def get_or_create(
        self,
        adapter_id: str,
        *,
        rank: int = 32,
        alpha: float = 32.0,
        target_modules: Iterable[str] | None = None,
        seed: int | None = None,
        tenant: str | None = None,
    ) -> Adapter:
        """The adapter of that name, made if there is none: for a program that may
        run twice. An existing one goes on after its last step.

        FailedPrecondition where it exists with another rank, alpha or
        target_modules; seed and tenant are for a new one.
        """
        operation = self._core.get_or_create(
            adapter_id, rank, alpha, target_modules, seed, tenant
        )
        return Adapter(self._driver.run(operation), self._driver)

    def adapter(self, adapter_id: str) -> Adapter:
        """An existing adapter; goes on after its last step. NotFound without it."""
        core = self._driver.run(self._core.adapter(adapter_id))
        return Adapter(core, self._driver)

    def adapters(self) -> list[AdapterInfo]:
        """All adapters, ordered by id."""
        return self._driver.run(self._core.adapters())

    def delete_adapter(self, adapter_id: str) -> None:
        """Forgets an adapter. Its checkpoints stay."""
        self._driver.run(self._core.delete_adapter(adapter_id))

    def import_adapter(
        self, adapter_id: str, folder: StrPath, *, tenant: str | None = None
    ) -> Adapter:
        """Makes an adapter from a PEFT LoRA folder on this machine."""
        operation = self._core.import_adapter(adapter_id, folder, tenant)
        return Adapter(self._driver.run(operation), self._driver)

    def checkpoints(self, adapter_id: str | None = None) -> list[CheckpointInfo]:
        """Newest first; of all adapters unless one is named."""
        return self._driver.run(self._core.checkpoints(adapter_id))

    def delete_checkpoint(self, adapter_id: str, name: str) -> None:
        """Deletes the checkpoint's files."""
        self._driver.run(self._core.delete_checkpoint(adapter_id, name))

    def sample(
        self, prompt: ArrayLike, **options: Unpack[SampleOptions]
    ) -> SampleResult:
        """Samples from the base model. prompt: [P] token ids, 1 <= P < context."""
        return self._driver.run(self._core.sampler.sample(prompt, options))

    def sample_many(
        self, prompts: Iterable[ArrayLike], **options: Unpack[SampleOptions]
    ) -> list[SampleResult]:
        """Samples of each prompt from the base model, in the prompts' order; see
        `Adapter.sample_many`."""
        bound = InFlight()
        each = self._core.sampler.sample_each(prompts, options, None, bound)
        return self._driver.run_many(
            each, lambda: bound.limit, self._core.caller.timeout
        )

    def sample_stream(
        self, prompt: ArrayLike, **options: Unpack[SampleOptions]
    ) -> Iterator[SampleDelta]:
        """The same tokens as they are made. Not repeated on errors."""
        request = self._core.sampler.stream_request(prompt, options)
        return self._driver.deltas(request, self._core.caller.timeout)

    def compute_logprobs(self, tokens: ArrayLike) -> FloatArray:
        """The base model's log-probability of each token after those before it, [N].

        tokens: [N], 1 <= N < the model's context. The first is 0 and means
        nothing: nothing predicts it.
        """
        return self._driver.run(self._core.sampler.compute_logprobs(tokens))

    def forward(
        self,
        data: Iterable[Datum],
        loss: str = "cross_entropy",
        **options: Unpack[LossOptions],
    ) -> TrainResult:
        """Scores with the base model; results in the data's order."""
        return self._driver.run(self._core.forward(data, loss, options))
