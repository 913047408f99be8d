"""The options that calls take and the results that they return, without protobuf."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict

import numpy as np
import numpy.typing as npt

from weft.errors import FailedPrecondition
from weft.server_loss import ServerLoss

FloatArray = npt.NDArray[np.float32]
TokenArray = npt.NDArray[np.uint32]
RoutingArray = npt.NDArray[np.uint16]
# Anything that numpy reads: lists, arrays, CPU tensors.
ArrayLike = npt.ArrayLike
# A text, or token ids [P].
Prompt = str | ArrayLike
StrPath = str | os.PathLike[str]
FinishReason = Literal["stop", "length"]
# Several stop entries, or one text or byte string.
Stop = str | bytes | Sequence[int | Sequence[int] | str | bytes]


@dataclass(frozen=True)
class Teacher:
    """The model from which an adapter learns with forward_kl, reverse_kl and js.

    adapter_id: an adapter of the same tenant, which may be the one that learns. None:
    the base model. snapshot: one of that adapter's snapshots. None: its latest weights
    when the call begins to run.
    """

    adapter_id: str | None = None
    snapshot: str | None = None


class LossOptions(TypedDict, total=False):
    """Settings of a loss. An absent setting takes its default.

    clip_low: For ppo, cispo and gspo. Default 0.8.
    clip_high: For ppo, cispo, gspo and stable_reinforce. Default 1.2.
    beta: For dro and stable_reinforce. For js the teacher's share of the mixture; there
        the default is 0.5. Default 0.05.
    teacher: For forward_kl, reverse_kl and js. Default None.
    temperature: Logits are divided by it. Default 1.0.
    return_entropy: Also returns entropies, in nats. Default False.
    score_all: Also returns the logprobs and entropies of tokens with weight 0; their
        losses stay 0. Default False.
    return_routing: Also returns the experts of every token; for models with experts.
        Default False.
    replay_routing: Targets in Datum.sampled use the experts with which they were drawn;
        for models with experts. Default False.
    replay_support: Targets in Datum.sampled get the supports from which they come.
        Default False.
    replay_logprobs: Targets in Datum.sampled get the logprobs with which they were
        drawn, in place of Datum.logprobs, which may then be absent. Default False.
    gradient_filter: For each scored token, the backward pass skips a block of the
        vocabulary if all probabilities in it are below this value. With 0 the gradient
        is exact. Default 0.0.
    custom_loss: For custom: the loss, from `trace_loss`. Default None.
    """

    clip_low: float | None
    clip_high: float | None
    beta: float | None
    teacher: Teacher | None
    temperature: float | None
    return_entropy: bool
    score_all: bool
    return_routing: bool
    replay_routing: bool
    replay_support: bool
    replay_logprobs: bool
    gradient_filter: float
    custom_loss: ServerLoss | None


class OptimOptions(TypedDict, total=False):
    """An optimizer's settings for one step. An absent setting takes its default.

    optimizer: Or "muon". An adapter's first step chooses, until a load with
        weights_only. Default 'adamw'.
    learning_rate: The size of the step. Default 0.0001.
    beta1: Decay of the gradient's mean, for adamw. Default 0.9.
    beta2: Decay of the gradient's square, for adamw. Default 0.95.
    eps: Added to the square's root, for adamw. Default 1e-12.
    momentum: Decay of the gradient's mean, for muon. Default 0.95.
    nesterov: Adds the gradient to the mean once more, for muon. Default True.
    ns_steps: Steps of the Newton-Schulz iteration, 1 to 10, for muon. Default 5.
    weight_decay: Decoupled from the gradient. Default 0.0.
    max_grad_norm: Clips the gradient's L2 norm; 0: no clipping. Default 0.0.
    """

    optimizer: str
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    momentum: float
    nesterov: bool
    ns_steps: int
    weight_decay: float
    max_grad_norm: float


ALL_THAT_FIT = 2**32 - 1  # A value of SampleOptions.max_tokens.


class SampleOptions(TypedDict, total=False):
    """How to draw samples. An absent setting takes its default.

    num_samples: How many samples to draw. Default 1.
    max_tokens: The most tokens of a sample, at least 1; ALL_THAT_FIT: what the context
        and the server's cache leave, which also bounds the default. Default 128.
    temperature: Logits are divided by it; 0 takes the most likely token. Default 1.0.
    top_k: Draws from the k most likely tokens; 0: all. Default 0.
    top_p: Total probability of the likeliest tokens to draw from. Default 1.0.
    min_p: Draws from the tokens that are at least this many times as likely as the
        likeliest one. Default 0.0.
    repetition_penalty: Divides positive logits of tokens that the prompt or the sample
        has, and multiplies negative ones. Default 1.0.
    presence_penalty: Subtracted from the logits of tokens that the sample has. Default
        0.0.
    frequency_penalty: Subtracted from a token's logit as often as the sample has it.
        Default 0.0.
    logit_bias: Added to the logits of these token ids. Default None.
    allowed_token_ids: Draws only these tokens; with None all. Default None.
    min_tokens: The least tokens that a sample has before it may stop. Default 0.
    seed: With None the server draws a seed. Default None.
    stop: Token ids, sequences of token ids, and text or bytes of the decoded output.
        Each ends a sample, as the model's end of sequence does. Default None.
    ignore_eos: The end of sequence does not end a sample. Default False.
    prompt_logprobs: Also returns the prompt's logprobs. Default False.
    top_logprobs: Also returns this many likely tokens per position. Default 0.
    prompt_top_logprobs: Also returns this many likely tokens per position of the
        prompt. Default 0.
    prompt_logprobs_last_n: prompt_logprobs and prompt_top_logprobs score only so many
        of the prompt's last tokens. Tokens before them may be cached. Default None.
    prompt_targets: For each token of the prompt but the first, the tokens that are
        scored in its place. Default None.
    prompt_alternatives: Also draws this many tokens at each position of the prompt but
        the first, at the call's temperature. Default 0.
    return_routing: Also returns the experts of every token; for models with experts.
        Default False.
    truncated_logprobs: The logprobs of drawn tokens are those among the tokens that
        top_k, top_p and min_p leave; for temperatures above 0. Default False.
    return_support: Also returns the tokens that could have been drawn in place of each
        token; needs truncated_logprobs. They are at most 1024, so with top_p, min_p,
        allowed_token_ids or min_tokens a top_k of at most 1024 is implied. Default
        False.
    record: The server keeps what training on the samples needs, for a day. Their
        sequence_id names it. Implies truncated_logprobs, and what return_support
        implies, if anything leaves tokens out. Default False.
    in_flight: Before each token a sample takes the adapter's latest weights, and
        `Sample.versions` names them; without a snapshot. Default False.
    recompute_cache: With in_flight: new weights first compute the keys and values of
        all the sample's tokens again. Default False.
    """

    num_samples: int
    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    min_tokens: int
    seed: int | None
    stop: Stop | None
    ignore_eos: bool
    prompt_logprobs: bool
    top_logprobs: int
    prompt_top_logprobs: int
    prompt_logprobs_last_n: int | None
    prompt_targets: Sequence[Sequence[int]] | None
    prompt_alternatives: int
    return_routing: bool
    truncated_logprobs: bool
    return_support: bool
    record: bool
    in_flight: bool
    recompute_cache: bool


@dataclass(frozen=True)
class ModelInfo:
    """The base model."""

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    eos_token_ids: list[int]
    num_parameters: int
    dtype: str
    num_experts: int  # In each layer with experts; 0: a dense model.
    experts_per_token: int
    expert_layers: int  # How many layers have experts.
    tokenizer_fingerprint: str  # Of what Client.tokenizer returns; "": there is none.


@dataclass(frozen=True)
class ServerInfo:
    """The model that a server runs, and its limits."""

    version: str
    device: str
    model: ModelInfo
    max_adapters: int
    num_adapters: int
    max_rank: int
    max_data_per_request: int
    max_tokens_per_request: int
    max_samples: int
    max_message_bytes: int
    draining: bool
    losses: list[str]  # The losses that training accepts.
    string_stops: bool  # Whether stop entries may be text or bytes.
    max_adapters_per_tenant: int
    max_adapter_bytes_per_tenant: int  # 0 = no limit.
    request_memory_bytes: int  # For the requests of all tenants under way.
    replay_window: int  # How many of an adapter's latest replies the server keeps.
    max_targets_per_token: int
    max_stop_entries: int
    max_top_logprobs: int  # Also the limit of prompt_top_logprobs.


@dataclass(frozen=True)
class LoraConfig:
    """An adapter's shape. The server has filled in every default."""

    rank: int
    alpha: float
    target_modules: list[str]
    seed: int | None


@dataclass(frozen=True)
class AdapterInfo:
    """What the server knows about one adapter."""

    adapter_id: str
    config: LoraConfig
    last_step: int  # Counts the steps that made the state.
    next_step: int  # The number of the next step; it never goes back.
    optim_steps: int
    optimizer: str  # That of optim_steps: "adamw" or "muon"; "": there are none.
    accumulated_tokens: int  # Of the gradient that no optimizer step has used.
    version: int
    num_parameters: int
    resident_bytes: int
    snapshots: list[str]
    created_at: float  # Unix time in seconds.
    tenant: str
    location: str  # Where the adapter's tensors are: "device", "host" or "disk".
    epoch: int  # Tells the adapter from earlier ones of the same name.
    durable_step: int  # Steps up to this number survive the end of the server.
    durability: str  # "memory" or "step", as in create_adapter.
    last_used_at: float  # Unix time in seconds of the last step, or of creation.
    restoring: bool  # A restarted server lists it, but has not restored it yet.


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint on the server's disk."""

    adapter_id: str
    name: str
    last_step: int
    optim_steps: int
    optimizer: str  # As in AdapterInfo.
    accumulated_tokens: int  # As in AdapterInfo.
    size_bytes: int
    created_at: float  # Unix time in seconds.
    config: LoraConfig
    kind: str  # "train", or "sampler": weights only.
    metadata: dict[str, str]
    expires_at: float | None  # Unix time in seconds; None: never.
    tenant: str
    base_model: str  # Name of the base model.
    base_fingerprint: str


class AdapterOptions(TypedDict, total=False):
    """The shape of a new adapter, and whose it is. An absent setting takes its
    default.

    rank: The rank of the LoRA weights. Default 32.
    alpha: The weights are scaled by alpha / rank. Default 32.0.
    target_modules: The layers that get LoRA weights, "q_proj", ... "down_proj",
        "lm_head", "embed_tokens"; None means all projections of the model's layers.
        Default None.
    seed: The seed of the initial weights; None lets the server derive it from the name.
        Default None.
    expert_rank: The rank of the experts in a mixture-of-experts model; None means rank
        divided by the number of experts per token. Default None.
    tenant: The owner of the adapter. The adapters of a tenant share the tenant's part
        of the device's time, its room in the queue and its limit of adapters. None
        means the token's tenant or, on a server without tokens, a tenant with the
        adapter's name. Default None.
    durability: What survives the end of the server, "memory" (nothing) or "step" (every
        step); None means the most that the server can keep. Default None.
    """

    rank: int
    alpha: float
    target_modules: Iterable[str] | None
    seed: int | None
    expert_rank: int | None
    tenant: str | None
    durability: str | None


class SaveOptions(TypedDict, total=False):
    """Optional properties of a checkpoint.

    kind: Or "sampler", which holds only weights. Default 'train'.
    metadata: The caller's own entries. Default None.
    ttl_seconds: The server deletes the checkpoint after that time; 0: never. Default 0.
    keep_newest: After the save, the server deletes the adapter's oldest checkpoints of
        the same kind, so that this many remain; 0 deletes none. Default 0.
    """

    kind: str
    metadata: Mapping[str, str] | None
    ttl_seconds: int
    keep_newest: int


@dataclass(frozen=True)
class DatumResult:
    """The results of one datum.

    `logprobs` and `losses` have the shape of `datum.targets`: [N] or [N, K]. For
    ragged targets they are flat, and `datum.per_token` splits them. Targets with
    weight 0 have loss 0. Unless the call set score_all, their logprobs are 0 too, and
    a token with only such targets has entropy 0. `entropies` is [N]. `routing` is
    [N, L K], in the form of Datum.routing. Each of the two is None if the call did not
    ask for it.
    """

    logprobs: FloatArray
    losses: FloatArray
    entropies: FloatArray | None = None
    routing: RoutingArray | None = None


@dataclass(frozen=True)
class TrainResult:
    """The result of a forward or a forward_backward call."""

    results: list[DatumResult]
    metrics: dict[str, float]  # Keys: `name:reduction`, always with "loss:sum".
    step: int  # The step's number; 0 for the base model.
    replayed: bool  # Whether this is the stored reply of a step that ran before.


@dataclass(frozen=True)
class OptimResult:
    """The result of an optim_step call."""

    grad_norm: float  # The gradient's L2 norm before clipping.
    version: int
    step: int
    accumulated_tokens: int  # Of the gradient.
    replayed: bool


@dataclass(frozen=True)
class _Drawn:
    """What a sample and a part of one have."""

    tokens: list[int]  # [S] drawn tokens, including the stop token.
    # [S] log-probabilities after penalties, biases and excluded tokens, and before
    # top_k, top_p and min_p (after them, with truncated_logprobs), at the call's
    # temperature. If the temperature is 0, they are at temperature 1.
    logprobs: FloatArray
    # In a SampleDelta None, unless it is the last of its sample.
    finish_reason: FinishReason | None
    top_logprobs: list[list[tuple[int, float]]]  # Empty unless asked for.


@dataclass(frozen=True)
class Sample(_Drawn):
    """One finished sample.

    `Datum.from_sample` turns it into training data.
    """

    prompt: Sequence[int] = ()  # [P]; the prompt that the tokens continue.
    # [P + S - 1, L K], if asked for: the experts of the prompt and of all drawn
    # tokens but the last, in the form of Datum.routing.
    routing: RoutingArray | None = None
    # [S], if asked for and if anything leaves tokens out: the ids from which each token
    # was drawn, in the form of Datum.support.
    support: list[TokenArray] | None = None
    sequence_id: str = ""  # With `record`: for SampledSpan.
    decoded: str | None = field(default=None, repr=False)  # What `text` returns.
    # [S] the versions of the adapter that drew the tokens; empty unless in_flight.
    versions: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Returns the drawn tokens as text, without special tokens.

        Raises FailedPrecondition if the client had no tokenizer when it sampled. It has
        one after Client.tokenizer, or after it sampled for a prompt that is a text.
        """
        if self.decoded is None:
            raise FailedPrecondition(
                "the sample has no text, because the client had no tokenizer: call "
                "client.tokenizer() before you sample, or give the prompt as text"
            )
        return self.decoded


@dataclass(frozen=True)
class SampledSpan:
    """Targets of a datum that a recorded sample has drawn: targets[start + i] is the
    sample's drawn token offset + i, for each i in 0..length - 1."""

    sequence_id: str  # Sample.sequence_id.
    start: int
    length: int
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class _OfPrompt:
    """What a call returns about its prompt, [P] tokens."""

    prompt_logprobs: FloatArray | None  # [P]; the first is 0 and has no meaning.
    # If asked for, [P] with an empty first entry; otherwise an empty list.
    prompt_top_logprobs: list[list[tuple[int, float]]]
    # One for each of prompt_targets, position after position; None unless asked for.
    prompt_target_logprobs: FloatArray | None = None
    # The draws and their logprobs at the call's temperature. If asked for, [P] with an
    # empty first entry; otherwise an empty list.
    prompt_alternatives: list[list[tuple[int, float]]] = field(default_factory=list)
    # How many of the prompt's tokens came from the cache of prefixes.
    prompt_cached_tokens: int = 0
    # The version of the weights; 0 for the base model. In flight, the version that
    # scored the prompt and drew the first tokens.
    version: int


@dataclass(frozen=True, kw_only=True)
class SampleResult(_OfPrompt):
    """All samples of one prompt."""

    samples: list[Sample]


@dataclass(frozen=True, kw_only=True)
class SampleDelta(_OfPrompt, _Drawn):
    """Tokens drawn since the last delta of the same sample. A stream's first delta has
    what the call returns about the prompt."""

    sample_index: int
    # [(P + S - 1) L K] in the sample's last delta, if requested: Sample.routing, flat.
    routing: RoutingArray | None = None
    support: list[TokenArray] | None = None  # Sample.support, in the same delta.
    sequence_id: str = ""  # Sample.sequence_id, in the same delta.
    versions: list[int] = field(default_factory=list)  # As in Sample.
