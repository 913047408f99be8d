"""The options that calls take and the results that they return, without protobuf."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypedDict

import numpy as np
import numpy.typing as npt

from weft.errors import FailedPrecondition
from weft.options import Option
from weft.server_loss import ServerLoss

FloatArray = npt.NDArray[np.float32]
TokenArray = npt.NDArray[np.uint32]
RoutingArray = npt.NDArray[np.uint16]
# Anything that numpy reads: lists, arrays, CPU tensors.
ArrayLike = npt.ArrayLike
# A text, or token ids [P].
Prompt = str | ArrayLike
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
    """Settings of a loss. An absent setting takes its default."""

    clip_low: Annotated[float | None, Option(0.8, "For ppo, cispo and gspo.")]
    clip_high: Annotated[
        float | None, Option(1.2, "For ppo, cispo, gspo and stable_reinforce.")
    ]
    beta: Annotated[
        float | None,
        Option(
            0.05,
            "For dro and stable_reinforce. For js the teacher's share of the mixture; "
            "there the default is 0.5.",
        ),
    ]
    teacher: Annotated[
        Teacher | None, Option(None, "For forward_kl, reverse_kl and js.")
    ]
    temperature: Annotated[float | None, Option(1.0, "Logits are divided by it.")]
    return_entropy: Annotated[bool, Option(False, "Also returns entropies, in nats.")]
    score_all: Annotated[
        bool,
        Option(
            False,
            "Also returns the logprobs and entropies of tokens with weight 0; their "
            "losses stay 0.",
        ),
    ]
    return_routing: Annotated[
        bool,
        Option(
            False, "Also returns the experts of every token; for models with experts."
        ),
    ]
    replay_routing: Annotated[
        bool,
        Option(
            False,
            "Targets in Datum.sampled use the experts with which they were drawn; for "
            "models with experts.",
        ),
    ]
    replay_support: Annotated[
        bool,
        Option(
            False, "Targets in Datum.sampled get the supports from which they come."
        ),
    ]
    replay_logprobs: Annotated[
        bool,
        Option(
            False,
            "Targets in Datum.sampled get the logprobs with which they were drawn, in "
            "place of Datum.logprobs, which may then be absent.",
        ),
    ]
    gradient_filter: Annotated[
        float,
        Option(
            0.0,
            "For each scored token, the backward pass skips a block of the vocabulary "
            "if all probabilities in it are below this value. With 0 the gradient is "
            "exact.",
        ),
    ]
    custom_loss: Annotated[
        ServerLoss | None, Option(None, "For custom: the loss, from `trace_loss`.")
    ]


class OptimOptions(TypedDict, total=False):
    """An optimizer's settings for one step. An absent setting takes its default."""

    optimizer: Annotated[
        str,
        Option(
            "adamw",
            'Or "muon". An adapter\'s first step chooses, until a load with '
            "weights_only.",
        ),
    ]
    learning_rate: Annotated[float, Option(1e-4, "The size of the step.")]
    beta1: Annotated[float, Option(0.9, "Decay of the gradient's mean, for adamw.")]
    beta2: Annotated[float, Option(0.95, "Decay of the gradient's square, for adamw.")]
    eps: Annotated[float, Option(1e-12, "Added to the square's root, for adamw.")]
    momentum: Annotated[float, Option(0.95, "Decay of the gradient's mean, for muon.")]
    nesterov: Annotated[
        bool, Option(True, "Adds the gradient to the mean once more, for muon.")
    ]
    ns_steps: Annotated[
        int, Option(5, "Steps of the Newton-Schulz iteration, 1 to 10, for muon.")
    ]
    weight_decay: Annotated[float, Option(0.0, "Decoupled from the gradient.")]
    max_grad_norm: Annotated[
        float, Option(0.0, "Clips the gradient's L2 norm; 0: no clipping.")
    ]


class SampleOptions(TypedDict, total=False):
    """How to draw samples. An absent setting takes its default."""

    num_samples: Annotated[int, Option(1, "How many samples to draw.")]
    max_tokens: Annotated[
        int | None, Option(128, "The most tokens of a sample, at least 1.")
    ]
    temperature: Annotated[
        float, Option(1.0, "Logits are divided by it; 0 takes the most likely token.")
    ]
    top_k: Annotated[int, Option(0, "Draws from the k most likely tokens; 0: all.")]
    top_p: Annotated[
        float, Option(1.0, "Total probability of the likeliest tokens to draw from.")
    ]
    min_p: Annotated[
        float,
        Option(
            0.0,
            "Draws from the tokens that are at least this many times as likely as the "
            "likeliest one.",
        ),
    ]
    repetition_penalty: Annotated[
        float,
        Option(
            1.0,
            "Divides positive logits of tokens that the prompt or the sample has, and "
            "multiplies negative ones.",
        ),
    ]
    presence_penalty: Annotated[
        float,
        Option(0.0, "Subtracted from the logits of tokens that the sample has."),
    ]
    frequency_penalty: Annotated[
        float,
        Option(0.0, "Subtracted from a token's logit as often as the sample has it."),
    ]
    logit_bias: Annotated[
        Mapping[int, float] | None,
        Option(None, "Added to the logits of these token ids."),
    ]
    allowed_token_ids: Annotated[
        Sequence[int] | None, Option(None, "Draws only these tokens; with None all.")
    ]
    min_tokens: Annotated[
        int, Option(0, "The least tokens that a sample has before it may stop.")
    ]
    seed: Annotated[int | None, Option(None, "With None the server draws a seed.")]
    stop: Annotated[
        Stop | None,
        Option(
            None,
            "Token ids, sequences of token ids, and text or bytes of the decoded "
            "output. Each ends a sample, as the model's end of sequence does.",
        ),
    ]
    ignore_eos: Annotated[
        bool, Option(False, "The end of sequence does not end a sample.")
    ]
    prompt_logprobs: Annotated[
        bool, Option(False, "Also returns the prompt's logprobs.")
    ]
    top_logprobs: Annotated[
        int, Option(0, "Also returns this many likely tokens per position.")
    ]
    prompt_top_logprobs: Annotated[
        int,
        Option(0, "Also returns this many likely tokens per position of the prompt."),
    ]
    prompt_logprobs_last_n: Annotated[
        int | None,
        Option(
            None,
            "prompt_logprobs and prompt_top_logprobs score only so many of the "
            "prompt's last tokens. Tokens before them may be cached.",
        ),
    ]
    prompt_targets: Annotated[
        Sequence[Sequence[int]] | None,
        Option(
            None,
            "For each token of the prompt but the first, the tokens that are scored in "
            "its place.",
        ),
    ]
    prompt_alternatives: Annotated[
        int,
        Option(
            0,
            "Also draws this many tokens at each position of the prompt but the first, "
            "at the call's temperature.",
        ),
    ]
    return_routing: Annotated[
        bool,
        Option(
            False, "Also returns the experts of every token; for models with experts."
        ),
    ]
    truncated_logprobs: Annotated[
        bool,
        Option(
            False,
            "The logprobs of drawn tokens are those among the tokens that top_k, top_p "
            "and min_p leave; for temperatures above 0.",
        ),
    ]
    return_support: Annotated[
        bool,
        Option(
            False,
            "Also returns the tokens that could have been drawn in place of each "
            "token; needs truncated_logprobs. They are at most 1024, so with top_p, "
            "min_p, allowed_token_ids or min_tokens a top_k of at most 1024 is "
            "implied.",
        ),
    ]
    record: Annotated[
        bool,
        Option(
            False,
            "The server keeps what training on the samples needs, for a day. Their "
            "sequence_id names it. Implies truncated_logprobs, and what return_support "
            "implies, if anything leaves tokens out.",
        ),
    ]
    in_flight: Annotated[
        bool,
        Option(
            False,
            "Before each token a sample takes the adapter's latest weights, and "
            "`Sample.versions` names them; without a snapshot.",
        ),
    ]
    recompute_cache: Annotated[
        bool,
        Option(
            False,
            "With in_flight: new weights first compute the keys and values of all the "
            "sample's tokens again.",
        ),
    ]


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
    max_queue_requests: int  # The most requests of all tenants that may wait.
    max_queue_tokens: int
    max_queue_requests_per_tenant: int
    max_queue_tokens_per_tenant: int
    reorder_window: int  # How far a step may be ahead of the lowest missing step.
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
    restoring: bool  # A restarted server lists it, but has not restored it yet.


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint on the server's disk."""

    adapter_id: str
    name: str
    last_step: int
    optim_steps: int
    optimizer: str  # As in AdapterInfo.
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
    default."""

    rank: Annotated[int, Option(32, "The rank of the LoRA weights.")]
    alpha: Annotated[float, Option(32.0, "The weights are scaled by alpha / rank.")]
    target_modules: Annotated[
        Iterable[str] | None,
        Option(
            None,
            'The layers that get LoRA weights, "q_proj", ... "down_proj", "lm_head", '
            '"embed_tokens"; None means all projections of the model\'s layers.',
        ),
    ]
    seed: Annotated[
        int | None,
        Option(
            None,
            "The seed of the initial weights; None lets the server derive it from the "
            "name.",
        ),
    ]
    expert_rank: Annotated[
        int | None,
        Option(
            None,
            "The rank of the experts in a mixture-of-experts model; None means rank "
            "divided by the number of experts per token.",
        ),
    ]
    tenant: Annotated[
        str | None,
        Option(
            None,
            "The owner of the adapter. The adapters of a tenant share the tenant's "
            "part of the device's time, its room in the queue and its limit of "
            "adapters. None means the token's tenant or, on a server without tokens, "
            "a tenant with the adapter's name.",
        ),
    ]
    durability: Annotated[
        str | None,
        Option(
            None,
            'What survives the end of the server, "memory" (nothing) or "step" (every '
            "step); None means the most that the server can keep.",
        ),
    ]


class SaveOptions(TypedDict, total=False):
    """Optional properties of a checkpoint."""

    kind: Annotated[str, Option("train", 'Or "sampler", which holds only weights.')]
    metadata: Annotated[
        Mapping[str, str] | None, Option(None, "The caller's own entries.")
    ]
    ttl_seconds: Annotated[
        int, Option(0, "The server deletes the checkpoint after that time; 0: never.")
    ]
    keep_newest: Annotated[
        int,
        Option(
            0,
            "After the save, the server deletes the adapter's oldest checkpoints of "
            "the same kind, so that this many remain; 0 deletes none.",
        ),
    ]


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
    # [P + S - 1, L K], if asked for: the experts of the prompt and of all drawn
    # tokens but the last, in the form of Datum.routing. A SampleDelta has that of the
    # whole sample, flat, if it is the sample's last.
    routing: RoutingArray | None = field(default=None, kw_only=True)
    # [S], if asked for and if anything leaves tokens out: the ids from which each token
    # was drawn, in the form of Datum.support. Of the whole sample, as `routing`.
    support: list[TokenArray] | None = field(default=None, kw_only=True)
    # With `record`: for SampledSpan. In a sample's last SampleDelta.
    sequence_id: str = field(default="", kw_only=True)
    # [S] the versions of the adapter that drew the tokens; empty unless in_flight.
    versions: list[int] = field(default_factory=list, kw_only=True)


@dataclass(frozen=True)
class Sample(_Drawn):
    """One finished sample.

    `Datum.from_sample` turns it into training data.
    """

    prompt: Sequence[int] = ()  # [P]; the prompt that the tokens continue.
    decoded: str | None = field(default=None, repr=False)  # What `text` returns.

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
    prompt_target_logprobs: FloatArray | None
    # The draws and their logprobs at the call's temperature. If asked for, [P] with an
    # empty first entry; otherwise an empty list.
    prompt_alternatives: list[list[tuple[int, float]]]
    # How many of the prompt's tokens came from the cache of prefixes.
    prompt_cached_tokens: int
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
