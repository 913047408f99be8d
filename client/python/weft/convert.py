"""Converts the package's types to protobuf messages and back. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from weft._proto import adapters_pb2, sampling_pb2, server_pb2, training_pb2
from weft.datum import Datum, support_offsets
from weft.errors import InvalidArgument
from weft.operations import Reply
from weft.server_loss import ServerLoss
from weft.steps import StepSlot
from weft.types import (
    AdapterInfo,
    AdapterOptions,
    CheckpointInfo,
    DatumResult,
    FinishReason,
    FloatArray,
    LoraConfig,
    LossOptions,
    ModelInfo,
    OptimOptions,
    OptimResult,
    RoutingArray,
    Sample,
    SampleDelta,
    SampleOptions,
    SampleResult,
    SaveOptions,
    ServerInfo,
    Stop,
    Teacher,
    TokenArray,
    TrainResult,
)

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

T = TypeVar("T")
# The programs that load exports (Loader in adapters.proto).
LOADERS = ("peft", "vllm", "llama.cpp")
_FINISH: dict[int, FinishReason] = {1: "stop", 2: "length"}
TrainRequest = TypeVar(
    "TrainRequest", training_pb2.ForwardBackwardRequest, training_pb2.ForwardRequest
)
TrainResponse = TypeVar(
    "TrainResponse", training_pb2.ForwardBackwardResponse, training_pb2.ForwardResponse
)


def _short_name(enum: EnumTypeWrapper, number: int) -> str:
    """Returns the name of an enum value in lower case, without the prefix that all
    values have; "unspecified" for 0."""
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    return enum.Name(number).removeprefix(prefix).lower()


def _enum_name(enum: EnumTypeWrapper, what: str, name: str) -> str:
    """Returns the full name of an enum value, given its short name."""
    numbers = [number for number in enum.values() if number != 0]
    values = {_short_name(enum, number): enum.Name(number) for number in numbers}
    if name not in values:
        raise InvalidArgument(f"{what} is {name!r}, must be one of {', '.join(values)}")
    return values[name]


def durability_name(name: str | None) -> str:
    """Returns the protobuf name of a durability. None means the server's default.
    Raises InvalidArgument for an unknown name."""
    if name is None:
        return "DURABILITY_UNSPECIFIED"
    return _enum_name(adapters_pb2.Durability, "durability", name)


def loader_name(name: str) -> str:
    """Returns the protobuf name of a program that loads exports. Raises
    InvalidArgument for an unknown name."""
    if name not in LOADERS:
        raise InvalidArgument(
            f"loader is {name!r}, must be one of {', '.join(LOADERS)}"
        )
    return f"LOADER_{name.upper().replace('.', '_')}"


def _optimizer_name(number: adapters_pb2.Optimizer) -> str:
    return _short_name(adapters_pb2.Optimizer, number) if number else ""


def _check_names(options_type: type, options: Mapping[str, object]) -> None:
    """Raises TypeError for an unknown option, as Python does for unknown keywords."""
    known = options_type.__annotations__
    for name in options:
        if name not in known:
            raise TypeError(f"unknown option {name!r}: one of {', '.join(known)}")


@contextmanager
def _sendable() -> Iterator[None]:
    """Raises InvalidArgument for values that a message cannot hold, such as a negative
    count."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"cannot be sent: {error}") from error


def _check_rank(name: str, rank: object) -> None:
    """Raises InvalidArgument for what is not a rank. 0 in a request is a default."""
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)) or rank < 1:
        raise InvalidArgument(f"{name} is {rank!r}, must be a whole number, at least 1")


def lora_config(options: AdapterOptions) -> adapters_pb2.LoraConfig:
    """Returns an adapter's configuration. Raises InvalidArgument for values that no
    server takes."""
    _check_names(AdapterOptions, options)
    rank = options.get("rank", 32)
    expert_rank = options.get("expert_rank")
    _check_rank("rank", rank)
    if expert_rank is not None:
        _check_rank("expert_rank", expert_rank)
    modules = [
        _enum_name(adapters_pb2.TargetModule, "a name in target_modules", name)
        for name in options.get("target_modules") or ()
    ]
    with _sendable():
        return adapters_pb2.LoraConfig(
            rank=rank,
            alpha=options.get("alpha", 32.0),
            seed=options.get("seed"),
            target_modules=modules,
            expert_rank=expert_rank,
        )


def _same_fields(cls: type[T], message: object, /, **others: object) -> T:
    """Returns an object of a dataclass with the message's fields of the same names.
    others: the fields that differ."""
    for field in fields(cls):  # type: ignore[arg-type]
        if field.name not in others:
            others[field.name] = getattr(message, field.name)
    return cls(**others)


def to_server_info(info: server_pb2.ServerInfo) -> ServerInfo:
    model = _same_fields(
        ModelInfo, info.model, eos_token_ids=list(info.model.eos_token_ids)
    )
    return _same_fields(ServerInfo, info, model=model, losses=list(info.losses))


def _to_lora_config(config: adapters_pb2.LoraConfig) -> LoraConfig:
    return LoraConfig(
        rank=config.rank,
        alpha=config.alpha,
        target_modules=[
            _short_name(adapters_pb2.TargetModule, number)
            for number in config.target_modules
        ],
        seed=config.seed if config.HasField("seed") else None,
    )


def to_adapter_info(adapter: adapters_pb2.Adapter) -> AdapterInfo:
    return _same_fields(
        AdapterInfo,
        adapter,
        config=_to_lora_config(adapter.config),
        optimizer=_optimizer_name(adapter.optimizer),
        snapshots=list(adapter.snapshots),
        location=_short_name(adapters_pb2.AdapterLocation, adapter.location),
        durability=_short_name(adapters_pb2.Durability, adapter.durability),
    )


def to_checkpoint_info(checkpoint: adapters_pb2.Checkpoint) -> CheckpointInfo:
    return _same_fields(
        CheckpointInfo,
        checkpoint,
        optimizer=_optimizer_name(checkpoint.optimizer),
        config=_to_lora_config(checkpoint.config),
        kind=_short_name(adapters_pb2.CheckpointKind, checkpoint.kind),
        metadata=dict(checkpoint.metadata),
        expires_at=checkpoint.expires_at or None,
    )


def save_request(
    adapter_id: str, name: str, overwrite: bool, slot: StepSlot, options: SaveOptions
) -> adapters_pb2.SaveCheckpointRequest:
    """Raises InvalidArgument for values that the message cannot hold."""
    _check_names(SaveOptions, options)
    kind = _enum_name(adapters_pb2.CheckpointKind, "kind", options.get("kind", "train"))
    with _sendable():
        return adapters_pb2.SaveCheckpointRequest(
            adapter_id=adapter_id,
            name=name,
            overwrite=overwrite,
            step=slot.number,
            epoch=slot.epoch,
            kind=kind,
            metadata=options.get("metadata") or {},
            ttl_seconds=options.get("ttl_seconds", 0),
            keep_newest=options.get("keep_newest", 0),
        )


def data_list(data: Iterable[Datum]) -> list[Datum]:
    """Returns the data of a call. Raises InvalidArgument for anything else."""
    if isinstance(data, (Datum, str, Mapping)):
        raise InvalidArgument(
            f"data is one {type(data).__name__}, must be a list of weft.Datum: write "
            "[datum]"
        )
    batch = list(data)
    for place, datum in enumerate(batch):
        if not isinstance(datum, Datum):
            raise InvalidArgument(
                f"data[{place}] is a {type(datum).__name__}, must be a weft.Datum: "
                "client.datum(record) makes one of a text or a record"
            )
    return batch


def datum_message(datum: Datum) -> training_pb2.Datum:
    """Returns a datum as a message. The message holds raw little-endian arrays, because
    Python can copy each such array as one block."""

    def raw(array: FloatArray | TokenArray | RoutingArray | None) -> bytes:
        return b"" if array is None else array.tobytes()

    message = training_pb2.Datum(
        tokens_le=datum.tokens.tobytes(),
        targets_le=datum.targets.tobytes(),
        weights_le=raw(datum.weights),
        logprobs_le=raw(datum.logprobs),
        advantages_le=raw(datum.advantages),
        targets_per_token=(datum.targets.shape[1] if datum.targets.ndim == 2 else 0),
        target_offsets_le=raw(datum.target_offsets),
        routing_le=raw(datum.routing),
        support_offsets_le=raw(support_offsets(datum.support)),
        support_tokens_le=b"".join(ids.tobytes() for ids in datum.support or ()),
        sampled_spans=[
            training_pb2.SampledSpan(
                sequence_id=span.sequence_id,
                offset=span.offset,
                start=span.start,
                length=span.length,
            )
            for span in datum.sampled
        ],
        teacher_tokens_le=raw(datum.teacher_tokens),
        teacher_offset=datum.teacher_offset,
    )
    for name, value in datum.custom_inputs.items():
        custom = message.custom_inputs[name]
        custom.shape.extend(value.shape)
        if value.dtype.kind == "f":
            custom.floats_le = value.tobytes()
        else:
            custom.ints_le = value.tobytes()
    return message


def _teacher(teacher: object) -> training_pb2.Teacher | None:
    if teacher is None:
        return None
    if not isinstance(teacher, Teacher):
        raise InvalidArgument(
            f"teacher is a {type(teacher).__name__}, must be a weft.Teacher: "
            "weft.Teacher(adapter_id) names an adapter, weft.Teacher() the base model"
        )
    return training_pb2.Teacher(
        base_model=teacher.adapter_id is None,
        adapter_id=teacher.adapter_id,
        snapshot=teacher.snapshot,
    )


def loss_config(loss: str, options: LossOptions) -> training_pb2.LossConfig:
    _check_names(LossOptions, options)
    function = _enum_name(training_pb2.LossFunction, "loss", loss)
    settings: dict[str, Any] = dict(options)
    custom: ServerLoss | None = settings.pop("custom_loss", None)
    teacher = settings.pop("teacher", None)
    with _sendable():
        config = training_pb2.LossConfig(
            function=function, teacher=_teacher(teacher), **settings
        )
        if custom is not None:
            config.custom_loss.graph = custom.graph
            for name, rank in custom.inputs.items():
                config.custom_loss.inputs.add(name=name, rank=rank)
    return config


def _array(raw: bytes) -> FloatArray:
    """Returns float32 values as an array that may be written to."""
    return np.frombuffer(raw, dtype="<f4").copy()


def _routing(raw: bytes, num_tokens: int) -> RoutingArray | None:
    """Returns the experts of each token, [N, L K], or None if `raw` is empty."""
    if not raw:
        return None
    return np.frombuffer(raw, dtype="<u2").reshape(num_tokens, -1).copy()


def _support(offsets: bytes, ids: bytes) -> list[TokenArray] | None:
    """Returns the support of each token, or None if `offsets` is empty."""
    if not offsets:
        return None
    inner = np.frombuffer(offsets, dtype="<u4")[1:-1]
    return np.split(np.frombuffer(ids, dtype="<u4").copy(), inner)


def to_train_result(data: Sequence[Datum], reply: Reply[TrainResponse]) -> TrainResult:
    """Returns the result of a Forward or ForwardBackward, in the shapes of `data`."""
    message = reply.message
    results = []
    for datum, result in zip(data, message.results, strict=True):
        entropies = result.entropies_le
        results.append(
            DatumResult(
                logprobs=_array(result.logprobs_le).reshape(datum.targets.shape),
                losses=_array(result.losses_le).reshape(datum.targets.shape),
                entropies=_array(entropies) if entropies else None,
                routing=_routing(result.routing_le, len(datum.tokens)),
            )
        )
    return TrainResult(
        results=results,
        metrics=dict(message.metrics),
        step=message.step,
        replayed=reply.replayed,
    )


def optim_config(options: OptimOptions) -> dict[str, Any]:
    """Returns the fields of an OptimStepRequest that have the optimizer's settings.
    Raises InvalidArgument for an unknown optimizer, or a setting that it lacks."""
    _check_names(OptimOptions, options)
    settings: dict[str, Any] = dict(options)
    optimizer = settings.pop("optimizer", "adamw")
    configs: dict[str, Any] = {
        "adamw": training_pb2.AdamWConfig,
        "muon": training_pb2.MuonConfig,
    }
    if optimizer not in configs:
        raise InvalidArgument(f"optimizer {optimizer!r}: one of {', '.join(configs)}")
    config = configs[optimizer]
    known = config.DESCRIPTOR.fields_by_name
    for name in settings:
        if name not in known:
            raise InvalidArgument(
                f"{name} is not a setting of {optimizer}: one of {', '.join(known)}"
            )
    with _sendable():
        return {optimizer: config(**settings)}


def report_request(
    adapter_id: str, metrics: Mapping[str, float], optim_steps: int | None
) -> training_pb2.ReportMetricsRequest:
    """Raises InvalidArgument for values that the message cannot hold."""
    with _sendable():
        return training_pb2.ReportMetricsRequest(
            adapter_id=adapter_id, metrics=dict(metrics), optim_steps=optim_steps
        )


def to_optim_result(reply: Reply[training_pb2.OptimStepResponse]) -> OptimResult:
    return _same_fields(OptimResult, reply.message, replayed=reply.replayed)


def stop_rule(stop: Stop, ignore_eos: bool) -> sampling_pb2.StopRule:
    """Returns a stop rule with the entries of `stop`, grouped by type."""
    rule = sampling_pb2.StopRule(ignore_eos=ignore_eos)
    if not isinstance(stop, Iterable):
        raise InvalidArgument(
            f"stop is {stop!r}, must be a text, or a list of texts, token ids and "
            "lists of token ids"
        )
    # A string is one entry, although Python can iterate over its characters.
    for entry in (stop,) if isinstance(stop, (str, bytes)) else stop:
        if isinstance(entry, (str, bytes)) and not entry:
            raise InvalidArgument("stop has an empty text, which would end every text")
        if isinstance(entry, str):
            rule.byte_strings.append(entry.encode())
        elif isinstance(entry, bytes):
            rule.byte_strings.append(entry)
        elif isinstance(entry, (int, np.integer)):
            rule.token_ids.append(int(entry))
        else:
            tokens = [int(token) for token in entry]
            rule.token_sequences.add(tokens=tokens)
    return rule


def _prompt_targets(
    targets: Sequence[Sequence[int]] | None,
) -> sampling_pb2.PromptTargets | None:
    if targets is None:
        return None
    return sampling_pb2.PromptTargets(
        counts=[len(row) for row in targets],
        tokens=[token for row in targets for token in row],
    )


def sample_request(
    prompt: Sequence[int],
    options: SampleOptions,
    adapter_id: str = "",
    snapshot: str | None = None,
    checkpoint: str = "",
) -> sampling_pb2.SampleRequest:
    _check_names(SampleOptions, options)
    for name in ("max_tokens", "num_samples"):
        if options.get(name) == 0:  # In a request, 0 means the server's default.
            raise InvalidArgument(f"{name} is 0, must be at least 1")
    if options.get("prompt_logprobs_last_n") == 0:  # In a request, 0 means all.
        raise InvalidArgument("prompt_logprobs_last_n is 0, must be at least 1")
    allowed = options.get("allowed_token_ids")
    if allowed is not None and len(allowed) == 0:  # In a request, none means all.
        raise InvalidArgument("allowed_token_ids is empty, must have at least one")
    settings: dict[str, Any] = {"num_samples": 1, **options}
    stop = settings.pop("stop", None)
    ignore_eos = settings.pop("ignore_eos", False)
    biases = settings.pop("logit_bias", None) or {}
    targets = settings.pop("prompt_targets", None)
    drawing = {
        name: settings.pop(name)
        for name in sampling_pb2.SamplingConfig.DESCRIPTOR.fields_by_name
        if name in settings
    }
    with _sendable():
        config = sampling_pb2.SamplingConfig(
            stop=stop_rule(() if stop is None else stop, ignore_eos),
            logit_bias=[
                sampling_pb2.TokenBias(token=token, bias=bias)
                for token, bias in dict(biases).items()
            ],
            **drawing,
        )
        return sampling_pb2.SampleRequest(
            adapter_id=adapter_id,
            snapshot=snapshot,
            checkpoint=checkpoint,
            prompt=prompt,
            config=config,
            prompt_targets=_prompt_targets(targets),
            **settings,
        )


def _floats(values: Iterable[float]) -> FloatArray:
    return np.fromiter(values, dtype="<f4")


def _top(lists: Iterable[sampling_pb2.TopLogprobs]) -> list[list[tuple[int, float]]]:
    return [list(zip(top.tokens, top.logprobs, strict=True)) for top in lists]


def _versions(spans: Iterable[sampling_pb2.VersionSpan]) -> list[int]:
    return [span.version for span in spans for _ in range(span.tokens)]


def _of_prompt(
    message: sampling_pb2.SampleResponse | sampling_pb2.SampleStreamResponse,
) -> dict[str, Any]:
    scores, targets = message.prompt_logprobs, message.prompt_target_logprobs
    return {
        "prompt_logprobs": _floats(scores) if scores else None,
        "prompt_top_logprobs": _top(message.prompt_top_logprobs),
        "prompt_target_logprobs": _floats(targets) if targets else None,
        "prompt_alternatives": _top(message.prompt_alternatives),
        "prompt_cached_tokens": message.prompt_cached_tokens,
        "version": message.version,
    }


def _drawn(
    message: sampling_pb2.Sample | sampling_pb2.SampleStreamResponse,
) -> dict[str, Any]:
    return {
        "tokens": list(message.tokens),
        "logprobs": _floats(message.logprobs),
        "finish_reason": _FINISH.get(int(message.finish_reason)),
        "top_logprobs": _top(message.top_logprobs),
        "support": _support(message.support_offsets_le, message.support_tokens_le),
        "sequence_id": message.sequence_id,
        "versions": _versions(message.version_spans),
    }


def to_sample_result(
    message: sampling_pb2.SampleResponse,
    prompt: Sequence[int],
    decode: Callable[[Sequence[int]], str | None],
) -> SampleResult:
    """Returns the samples of a reply. `prompt`: the request's prompt, [P]. `decode`:
    returns the text of tokens, or None."""
    samples = [
        Sample(
            **_drawn(sample),
            prompt=prompt,
            routing=_routing(sample.routing_le, len(prompt) + len(sample.tokens) - 1),
            decoded=decode(sample.tokens),
        )
        for sample in message.samples
    ]
    return SampleResult(samples=samples, **_of_prompt(message))


def to_sample_delta(message: sampling_pb2.SampleStreamResponse) -> SampleDelta:
    routing = np.frombuffer(message.routing_le, dtype="<u2").copy()
    return SampleDelta(
        sample_index=message.sample_index,
        routing=routing if message.routing_le else None,
        **_drawn(message),
        **_of_prompt(message),
    )
