"""The base of the asyncio client, and one adapter of it, from which generate.py makes
the synchronous weft.adapter."""

from __future__ import annotations

from asyncio import Task
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import NoReturn, Unpack

from weft import convert, custom_loss, methods
from weft._proto import adapters_pb2, sampling_pb2, server_pb2
from weft.convert import durability_name, loader_name
from weft.core import StepCore
from weft.data import ModelTokenizer
from weft.datum import Datum
from weft.errors import InvalidArgument
from weft.folders import FolderWriter
from weft.methods import Method, RequestT, ResponseT
from weft.operations import Caller
from weft.options import takes
from weft.sampling import InFlight, SamplerCore
from weft.served_tokenizer import ServedTokenizer, check_fits, started_info
from weft.steps import StepCounter
from weft.tasks import TaskDriver
from weft.types import (
    AdapterInfo,
    CheckpointInfo,
    FloatArray,
    LossOptions,
    ModelInfo,
    OptimOptions,
    OptimResult,
    Prompt,
    SampleDelta,
    SampleOptions,
    SampleResult,
    SaveOptions,
    StrPath,
    TrainResult,
)


class AsyncSamplerSubmit:
    """Samples that return at once, so that several can be in flight."""

    def __init__(self, sampler: SamplerCore, driver: TaskDriver) -> None:
        self._sampler = sampler
        self._driver = driver

    @takes(SampleOptions)
    def sample(
        self,
        prompt: Prompt,
        *,
        snapshot: str | None = None,
        **options: Unpack[SampleOptions],
    ) -> Task[SampleResult]:
        """Samples from the base model; or from a snapshot of the adapter, or from the
        weights that are the latest when sampling starts. Sampling is not a step: it
        takes no step number and does not wait for steps."""
        return self._driver.submit(self._sampler.sample(prompt, options, snapshot))


class AsyncSampler:
    """What the base model, an adapter and a checkpoint have in common: they draw
    samples and score tokens.

    snapshot, in all methods: one of the adapter's snapshots. None means the weights
    that are the latest when the call runs. The base model and a checkpoint have no
    snapshots.
    """

    def __init__(
        self,
        caller: Caller,
        driver: TaskDriver,
        adapter_id: str = "",
        checkpoint: str = "",
    ) -> None:
        self._caller = caller
        self._driver = driver
        self._sampler = SamplerCore(caller, adapter_id, checkpoint)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"weft: {self!r} has a connection, so it is neither pickled nor copied: "
            "pass on the server's address and the adapter's id, and make a client there"
        )

    async def _call(
        self,
        method: Method[RequestT, ResponseT],
        request: RequestT | Iterable[RequestT],
        *,
        retry: bool = True,
        gone_is_done: bool = False,
    ) -> ResponseT:
        operation = self._caller.call(
            method, request, retry=retry, gone_is_done=gone_is_done
        )
        return (await self._driver.run(operation)).message

    async def _served_tokenizer(
        self,
        model: ModelInfo,
        chat_template: StrPath | None,
        chat_template_kwargs: Mapping[str, object] | None,
    ) -> ModelTokenizer:
        """Returns the server's tokenizer, from the cache if it is there."""
        with ServedTokenizer(model) as files:
            if not files.is_cached():
                request = server_pb2.GetTokenizerRequest()
                async for message in self._driver.stream(
                    methods.GET_TOKENIZER, request, self._caller.timeout
                ):
                    files.add(message.chunk)
                files.keep()
            return files.read(chat_template, chat_template_kwargs)

    async def _load_tokenizer(
        self,
        own: ModelTokenizer | None = None,
        chat_template: StrPath | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> ModelTokenizer:
        """Does what AsyncClient.tokenizer does."""
        texts = self._caller.texts
        model = (await self._driver.run(started_info(self._caller))).model
        is_same = texts.fingerprint == model.tokenizer_fingerprint
        is_plain = own is None and chat_template is None and not chat_template_kwargs
        if texts.tokenizer is not None and is_same and is_plain:
            return texts.tokenizer
        served = None
        if own is None or model.tokenizer_fingerprint:
            served = await self._served_tokenizer(
                model, chat_template, chat_template_kwargs
            )
        if own is not None:
            check_fits(own, served, model)
        texts.tokenizer, texts.fingerprint = own or served, model.tokenizer_fingerprint
        return texts.require()

    async def _prepare(self, prompts: Sequence[Prompt]) -> None:
        """Gets the tokenizer if a prompt is a text."""
        if self._caller.texts.needs_tokenizer(prompts):
            await self._load_tokenizer()

    @takes(SampleOptions)
    async def sample(
        self,
        prompt: Prompt,
        *,
        snapshot: str | None = None,
        **options: Unpack[SampleOptions],
    ) -> SampleResult:
        """Draws `num_samples` samples for the prompt.

        prompt: a text, or [P] token ids, 1 <= P < the model's context. Raises NotFound
        if there is no such snapshot.
        """
        await self._prepare([prompt])
        return await self._driver.run(self._sampler.sample(prompt, options, snapshot))

    @takes(SampleOptions)
    async def sample_many(
        self,
        prompts: Iterable[Prompt],
        *,
        snapshot: str | None = None,
        **options: Unpack[SampleOptions],
    ) -> list[SampleResult]:
        """Draws `num_samples` samples for each prompt. The results are in the prompts'
        order.

        The client keeps as many prompts in flight as the server admits. If the
        server is full, the client retries after the delay that the server names. If a
        seed is given, prompt i uses seed + i. An error that retries do not cure is
        raised and cancels the other prompts. The client's timeout bounds the time from
        one answer to the next, so the whole call may take longer than the timeout.
        """
        known = self._caller.texts.prompts(prompts)
        await self._prepare(known)
        bound = InFlight()
        each = self._sampler.sample_each(known, options, snapshot, bound)
        return await self._driver.run_many(
            each, lambda: bound.limit, self._caller.timeout
        )

    @takes(SampleOptions)
    def sample_stream(
        self,
        prompt: Prompt,
        *,
        snapshot: str | None = None,
        **options: Unpack[SampleOptions],
    ) -> AsyncIterator[SampleDelta]:
        """Yields the tokens that `sample` would return, as soon as they are drawn.

        A stream that fails raises the error and is not repeated.
        """
        self._caller.require_open()
        request = self._sampler.request(prompt, options, snapshot)
        return self._driver.deltas(
            sampling_pb2.SampleStreamRequest(request=request), self._caller.timeout
        )

    async def compute_logprobs(
        self, tokens: Prompt, *, snapshot: str | None = None
    ) -> FloatArray:
        """Returns the log-probability of each token, given the tokens before it, [N].

        tokens: [N], 1 <= N < the model's context. The first value is 0 and has no
        meaning, because no token comes before the first. The call is not a step.
        """
        # One token is drawn, because a sample has at least one.
        result = await self.sample(
            tokens,
            snapshot=snapshot,
            prompt_logprobs=True,
            max_tokens=1,
            temperature=0.0,
        )
        if result.prompt_logprobs is None:
            raise InvalidArgument("the server returned no scores of the prompt")
        return result.prompt_logprobs


class AsyncSubmit(AsyncSamplerSubmit):
    """Calls that return at once, so that several can be in flight.

    Each step gets its number when it is submitted, and the server runs the steps in
    that order. A step that cannot be sent raises at once; the future or task raises
    all other errors.

    An asyncio client returns tasks. If a task is cancelled, its step may or may not
    have run. A synchronous client returns futures. A future cannot be cancelled, but it
    ends when the client's timeout has passed. A future's callback may submit calls, but
    if it waits for a call it gets FailedPrecondition.
    """

    def __init__(
        self, sampler: SamplerCore, driver: TaskDriver, steps: StepCore
    ) -> None:
        super().__init__(sampler, driver)
        self._steps = steps

    @takes(LossOptions)
    def forward_backward(
        self,
        data: Iterable[Datum],
        loss: str = "cross_entropy",
        **options: Unpack[LossOptions],
    ) -> Task[TrainResult]:
        """Adds the gradient of the summed loss to the accumulator."""
        return self._driver.submit(
            self._steps.train(methods.FORWARD_BACKWARD, data, loss, options)
        )

    @takes(LossOptions)
    def forward(
        self,
        data: Iterable[Datum],
        loss: str = "cross_entropy",
        **options: Unpack[LossOptions],
    ) -> Task[TrainResult]:
        """Computes what forward_backward returns, without the gradient."""
        return self._driver.submit(
            self._steps.train(methods.FORWARD, data, loss, options)
        )

    @takes(OptimOptions)
    def optim_step(self, **options: Unpack[OptimOptions]) -> Task[OptimResult]:
        """Applies an optimizer to the accumulated gradient and clears it."""
        return self._driver.submit(self._steps.optim_step(options))

    def zero_grad(self) -> Task[OptimResult]:
        """Drops the accumulated gradient, after the steps submitted earlier."""
        return self._driver.submit(self._steps.zero_grad())

    @takes(SaveOptions)
    def save(
        self, name: str, overwrite: bool = False, **options: Unpack[SaveOptions]
    ) -> Task[CheckpointInfo]:
        """Writes a checkpoint on the server, after the steps submitted earlier."""
        return self._driver.submit(self._steps.save(name, overwrite, options))

    def snapshot(self, name: str) -> Task[int]:
        """Keeps the weights under a name, after the steps submitted earlier. The result
        is the version of the weights."""
        return self._driver.submit(self._steps.snapshot(name))


class AsyncAdapter(AsyncSampler):
    """A handle of one adapter on the server. Methods of AsyncClient return it.

    Every call raises a WeftError if the server refuses it, if it fails, or if the
    client's timeout passes first.
    """

    def __init__(
        self, caller: Caller, driver: TaskDriver, adapter: adapters_pb2.Adapter
    ) -> None:
        super().__init__(caller, driver, adapter.adapter_id)
        self._id = adapter.adapter_id
        self._tenant = adapter.tenant
        self._counter = StepCounter(self._id, adapter.next_step, adapter.epoch)
        self._steps = StepCore(caller, self._counter, submits=False)
        submitted = StepCore(caller, self._counter, submits=True)
        self.submit = AsyncSubmit(self._sampler, driver, submitted)

    def __repr__(self) -> str:
        return f"AsyncAdapter({self.id!r}, next_step={self.next_step})"

    @property
    def id(self) -> str:
        """Returns the adapter's name on the server."""
        return self._id

    @property
    def next_step(self) -> int:
        """Returns the number that the next step gets."""
        return self._counter.next_step

    async def resync(self) -> int:
        """Asks the server for the next step's number and returns it.

        Call it after an error whose message asks for it. Raises FailedPrecondition
        while steps are in flight.
        """
        return await self._driver.run(self._caller.resync(self._counter))

    @takes(LossOptions)
    async def forward_backward(
        self,
        data: Iterable[Datum],
        loss: str = "cross_entropy",
        **options: Unpack[LossOptions],
    ) -> TrainResult:
        """Adds the gradient of the summed loss to the accumulator.

        loss: cross_entropy, importance_sampling, ppo, cispo, dro, gspo,
        stable_reinforce or custom; or forward_kl, reverse_kl or js, which compare the
        adapter's whole distribution with that of `teacher`. The results are in the
        data's order, and each has the shape of its targets.
        Raises InvalidArgument for data that the loss or the server's limits forbid.
        """
        return await self._driver.run(
            self._steps.train(methods.FORWARD_BACKWARD, data, loss, options)
        )

    @takes(LossOptions)
    async def forward(
        self,
        data: Iterable[Datum],
        loss: str = "cross_entropy",
        **options: Unpack[LossOptions],
    ) -> TrainResult:
        """Computes what forward_backward returns, without the gradient.

        The call is a step and takes a step number, unlike `score`.
        """
        return await self._driver.run(
            self._steps.train(methods.FORWARD, data, loss, options)
        )

    @takes(LossOptions)
    async def score(
        self,
        data: Iterable[Datum],
        loss: str = "cross_entropy",
        *,
        snapshot: str | None = None,
        **options: Unpack[LossOptions],
    ) -> TrainResult:
        """Computes the same as forward, but is not a step.

        The call takes no step number and does not wait for steps that have not
        reached the server, so an evaluator does not disturb a trainer. Without a
        snapshot it uses the weights that are the latest when it runs.
        """
        return await self._driver.run(
            self._sampler.score(data, loss, options, snapshot)
        )

    async def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: custom_loss.LossFn
    ) -> TrainResult:
        """Trains with a loss that this process computes from the log-probabilities.

        loss_fn gets one array of log-probabilities per datum. It returns the loss and,
        for each array, a gradient of the same shape. `weft.torch_loss` makes a loss_fn
        from torch code. The call takes two steps. Raises InvalidArgument if the number
        or the shape of the gradients does not fit.
        """
        forward = await self.forward(data)
        surrogate = custom_loss.surrogate(data, forward, loss_fn)
        return surrogate.finish(forward, await self.forward_backward(surrogate.data))

    @takes(OptimOptions)
    async def optim_step(self, **options: Unpack[OptimOptions]) -> OptimResult:
        """Applies an optimizer to the accumulated gradient and clears it."""
        return await self._driver.run(self._steps.optim_step(options))

    async def zero_grad(self) -> OptimResult:
        """Drops the accumulated gradient. It is a step, so all earlier ones have ended
        when it returns; its result tells how many tokens the gradient had. A program
        that goes on after a failure calls it, so that no gradient counts twice."""
        return await self._driver.run(self._steps.zero_grad())

    async def report(
        self, metrics: Mapping[str, float], optim_steps: int | None = None
    ) -> None:
        """Adds a point to the adapter's curves on the server's console: values of your
        own by name, at most 8, such as "loss", "reward" or "eval_loss".

        optim_steps: the number of optimizer steps before the values were measured;
        None: the adapter's present number. The console takes a curve "loss" for the
        adapter's loss.
        """
        request = convert.report_request(self.id, metrics, optim_steps)
        await self._call(methods.REPORT_METRICS, request)

    @takes(SaveOptions)
    async def save(
        self, name: str, overwrite: bool = False, **options: Unpack[SaveOptions]
    ) -> CheckpointInfo:
        """Writes a checkpoint on the server and returns its description.

        `SaveOptions` describes the options. Raises AlreadyExists if the name is taken
        and overwrite is False.
        """
        return await self._driver.run(self._steps.save(name, overwrite, options))

    async def load(
        self,
        name: str,
        source: str | None = None,
        weights_only: bool = False,
        durability: str | None = None,
    ) -> AdapterInfo:
        """Replaces the adapter's state by a checkpoint and returns the new state.

        source: the adapter that saved the checkpoint; None means this adapter.
        weights_only: load no optimizer state, gradient or step number; these start
        anew. A checkpoint of kind "sampler" can only be loaded with weights_only.
        durability: as in create_adapter, but used only if the server has lost the
        adapter and the load makes it again. An existing adapter keeps its durability.
        Raises NotFound if there is no such checkpoint, FailedPrecondition while steps
        are in flight.
        """
        # A load has no step number and no epoch, so it may be repeated. If the server
        # has lost the adapter, the load makes it again for its tenant.
        self._counter.require_idle("load")
        request = adapters_pb2.LoadCheckpointRequest(
            adapter_id=self.id,
            source_adapter_id=source or "",
            name=name,
            weights_only=weights_only,
            tenant=self._tenant,
            durability=durability_name(durability),
        )
        try:
            reply = await self._call(methods.LOAD_CHECKPOINT, request)
        except BaseException as error:  # An interrupt, too: the load may have run.
            self._counter.forget(f"a load of {self.id!r} failed ({error!r})")
            raise
        self._counter.reset(reply.adapter.next_step, reply.adapter.epoch)
        return convert.to_adapter_info(reply.adapter)

    async def snapshot(self, name: str) -> int:
        """Keeps the current weights under a name and returns their version. Later
        steps do not change a snapshot."""
        return await self._driver.run(self._steps.snapshot(name))

    async def release_snapshot(self, name: str) -> None:
        """Removes the snapshot's name. The snapshot's memory is freed when no sample
        uses it any more."""
        request = adapters_pb2.ReleaseSnapshotRequest(adapter_id=self.id, name=name)
        await self._call(methods.RELEASE_SNAPSHOT, request, gone_is_done=True)

    async def export(
        self,
        folder: StrPath,
        *,
        snapshot: str | None = None,
        base_model: str | None = None,
        model_dir: StrPath | None = None,
        loader: str = "peft",
    ) -> None:
        """Writes the latest weights, or a snapshot, to a PEFT folder on this machine.

        loader: the program that loads the folder, "peft", "vllm" or "llama.cpp". Others
        may load it without an error and compute something else. base_model: what other
        programs load the base model from, a name of the Hub or a folder; None writes
        the server's name for it. model_dir: a model folder whose tokenizer files are
        copied. With either, the folder also gets a model card. Files in the folder are
        replaced only after the last byte has arrived. Raises InvalidArgument if
        model_dir has no file of a tokenizer, and FailedPrecondition if the program has
        no place for a part of the adapter.
        """
        self._caller.require_open()
        request = adapters_pb2.ExportAdapterRequest(
            adapter_id=self.id, snapshot=snapshot or "", loader=loader_name(loader)
        )
        with FolderWriter(folder) as writer:
            async for message in self._driver.stream(
                methods.EXPORT_ADAPTER, request, self._caller.timeout
            ):
                writer.add(message.chunk)
            writer.commit(base_model, model_dir, loader)

    async def info(self) -> AdapterInfo:
        """Returns what the server knows about the adapter. Raises NotFound if the
        adapter was deleted."""
        request = adapters_pb2.GetAdapterRequest(adapter_id=self.id)
        reply = await self._call(methods.GET_ADAPTER, request)
        return convert.to_adapter_info(reply.adapter)

    async def delete(self) -> None:
        """Deletes the adapter and its snapshots. Its checkpoints stay on disk."""
        request = adapters_pb2.DeleteAdapterRequest(adapter_id=self.id)
        await self._call(methods.DELETE_ADAPTER, request, gone_is_done=True)
