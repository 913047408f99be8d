"""The reference for every number of the daemon: transformers + peft on the CPU, one
sequence at a time, without padding.

The weights are the checkpoint's f32, rounded to bf16 if the daemon computes in
bf16. The arithmetic is f64, because torch's own errors in f32 are too large:
log_softmax over 49152 entries has an error of 8e-6. Gradients of sequences of two
tokens have an error of 1e-4, which is as large as the bound tolerance.GRADIENTS.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import daemon
import experts
import fused
import numpy as np
import torch
from models import TINY, auto_class
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file

# In most products of a tiny model, a second thread would only wait for the first.
# ctest has other work for that core.
torch.set_num_threads(1)
# No test reads the README.md that peft adds to a folder, and its template takes half of
# the time of a save.
PeftModel.create_or_update_model_card = lambda *_: None

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}

ALL_LINEAR = tuple("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split())
PEFT_PREFIX = "base_model.model."
# The parts of a wrapped model that read images.
IMAGE_PARTS = r".*\b(vision_tower|multi_modal_projector|visual)\b.*"


@dataclass(frozen=True)
class AdapterShape:
    """The shape of a LoRA adapter."""

    rank: int
    alpha: float
    targets: tuple[str, ...] | str = ALL_LINEAR
    rslora: bool = False
    # Further fields of peft's LoraConfig.
    options: dict[str, Any] = field(default_factory=dict)


# Three adapters that differ in everything. Two of them train the output head.
MIXED = (
    AdapterShape(4, 8.0, ("q_proj", "v_proj")),
    AdapterShape(8, 32.0, ("k_proj", "o_proj", "gate_proj", "down_proj", "lm_head")),
    AdapterShape(16, 16.0, (*ALL_LINEAR, "lm_head")),
)


# peft fuses gate and up of experts, so an adapter has both or neither.
MIXED_EXPERTS = (
    MIXED[0],
    AdapterShape(8, 32.0, ("k_proj", "o_proj", "down_proj", "lm_head")),
    MIXED[2],
)
# peft's conversion assumes that every gate_proj, up_proj and down_proj belongs to a
# single expert. So peft cannot read an adapter of a shared expert.
MIXED_SHARED = (
    MIXED[0],
    AdapterShape(8, 32.0, ("k_proj", "o_proj", "lm_head")),
    AdapterShape(16, 16.0, ("q_proj", "k_proj", "v_proj", "o_proj")),
)


# q, k and v, or gate and up, cannot be without each other.
MIXED_FUSED = (
    AdapterShape(4, 8.0, ("q_proj", "k_proj", "v_proj")),
    AdapterShape(8, 32.0, ("o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")),
    MIXED[2],
)


# The projections of layers with a gated delta rule, and their fused form.
DELTA = tuple("in_proj_qkv in_proj_z in_proj_b in_proj_a out_proj".split())
FUSED_DELTA = ("in_proj_qkvz", "in_proj_ba", "out_proj")


def _with_delta(
    shapes: tuple[AdapterShape, ...], modules: tuple[str, ...]
) -> tuple[AdapterShape, ...]:
    """Adds all but the last of the modules to the first shape, all but the first to
    the second, and all to the third."""
    parts = (modules[:-1], modules[1:], modules)
    return tuple(
        replace(shape, targets=(*shape.targets, *part))
        for shape, part in zip(shapes, parts, strict=True)
    )


def mixed_shapes(kind: str) -> tuple[AdapterShape, ...]:
    """Returns three adapters for a model of this kind, whatever its head."""
    kind = kind.removesuffix("-tied").removesuffix("-untied")
    if kind in ("qwen2-moe", "glm4-moe"):
        return MIXED_SHARED
    if kind == "qwen3-5-moe":
        return _with_delta(MIXED_SHARED, DELTA)
    if kind == "qwen3-next":
        return _with_delta(MIXED_SHARED, FUSED_DELTA)
    if kind.startswith("qwen3-5"):
        return _with_delta(MIXED, DELTA)
    if kind.startswith(("phi3", "glm4")):
        return MIXED_FUSED
    is_sparse = "num_experts_per_tok" in TINY.get(kind, {})
    return MIXED_EXPERTS if is_sparse else MIXED


class Reference:
    """A base model in transformers."""

    # Whether the files of adapters have the base's embedding or head, as peft decides.
    save_embedding_layers: bool | str = "auto"

    def __init__(self, folder: Path):
        self.model = auto_class(folder).from_pretrained(
            folder,
            dtype=DTYPES[daemon.DTYPE],
            attn_implementation="eager",
            # The other implementations have no f64.
            experts_implementation="eager",
        )
        self.model.eval().double()
        self.config = self.model.config.get_text_config()
        self.vocab = int(self.config.vocab_size)
        # SmolLM2's head takes 226 MB. The folders of tiny models have theirs.
        if self.vocab > 10_000:
            self.save_embedding_layers = False
        self.ends = _as_list(self.model.generation_config.eos_token_id)
        self.model.generation_config.eos_token_id = None

    def make_adapter(self, folder: Path, shape: AdapterShape, seed: int) -> Path:
        """Makes a PEFT folder with random A and B, neither of them zero."""
        if experts.has_experts(self.config):
            return experts.write_adapter(self.model, folder, shape, seed)
        self.model = self._make_peft_model(folder, shape, seed).unload()
        return folder

    @contextmanager
    def new_adapter(
        self, folder: Path, shape: AdapterShape, seed: int
    ) -> Iterator[Adapted]:
        """Makes a PEFT folder, and returns the model with its adapter, ready to
        train."""
        if experts.has_experts(self.config):
            with self.adapter(self.make_adapter(folder, shape, seed)) as adapted:
                yield adapted
            return
        peft_model = self._make_peft_model(folder, shape, seed).double()
        try:
            yield Adapted(peft_model)
        finally:
            self.model = peft_model.unload()

    def _make_peft_model(self, folder: Path, shape: AdapterShape, seed: int) -> Any:
        """Returns the model with the adapter in f32 that `folder` has."""
        torch.manual_seed(seed)
        is_expression = isinstance(shape.targets, str)
        options = (
            {"target_modules": shape.targets}
            if is_expression
            else fused.peft_options(shape, self.config)
        )
        if self.config is not self.model.config:
            options["exclude_modules"] = IMAGE_PARTS
        peft_model = get_peft_model(
            self.model,
            LoraConfig(
                r=shape.rank,
                lora_alpha=shape.alpha,
                use_rslora=shape.rslora,
                task_type="CAUSAL_LM",
                **{**options, **shape.options},
            ),
        )
        with torch.no_grad():
            for name, parameter in peft_model.named_parameters():
                if "lora_B" in name or "lora_embedding_A" in name:
                    parameter.normal_(0.0, 0.02)
                mask = fused.block_mask(name, parameter, self.config)
                if mask is not None and not is_expression:
                    parameter.mul_(mask)
                if "lora_" in name:
                    parameter.data = parameter.data.float()
        peft_model.save_pretrained(
            folder, save_embedding_layers=self.save_embedding_layers
        )
        return peft_model

    @contextmanager
    def adapter(self, folder: Path) -> Iterator[Adapted]:
        """Returns the model with the adapter of a PEFT folder, ready to train."""
        with warnings.catch_warnings():
            # peft only warns about modules that it does not find in the folder.
            warnings.filterwarnings("error", message=".*missing adapter keys.*")
            peft_model = PeftModel.from_pretrained(
                self.model, folder, is_trainable=True
            ).double()
        try:
            yield Adapted(peft_model)
        finally:
            self.model = peft_model.unload()

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Returns the logits, [N, V]."""
        with torch.no_grad():
            return np.asarray(_logits(self.model, tokens).numpy())

    def logprobs(
        self, tokens: Sequence[int], targets: Sequence[int], temperature: float = 1.0
    ) -> np.ndarray:
        """Returns the log-probability of every target, [N]."""
        with torch.no_grad():
            picked = target_logprobs(self.model, tokens, targets, temperature)
            return np.asarray(picked.numpy())

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Returns the tokens that generate() appends to prompts of equal length. It
        does not stop early."""
        ids = torch.tensor(prompts)
        with torch.no_grad():
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
            )
        return [[int(token) for token in row] for row in output[:, ids.shape[1] :]]


class Step(NamedTuple):
    """What a forward and backward pass of an adapter's data gives."""

    loss: float
    logprobs: list[np.ndarray]  # Each is [N].
    gradients: dict[str, np.ndarray]


class Adapted:
    """A base model with one trainable adapter."""

    def __init__(self, peft_model: PeftModel):
        self.model = peft_model.eval()
        self.parameters = {
            _plain_name(name): parameter
            for name, parameter in peft_model.named_parameters()
            if parameter.requires_grad
        }
        self.config = peft_model.config.get_text_config()
        experts.keep_halves_apart(self.parameters, self.config)
        fused.keep_parts_apart(self.parameters, self.config)

    def in_bf16(self) -> Adapted:
        """Returns a copy that computes in bf16, as transformers does for its users. It
        has the gradients that are already here."""
        return Adapted(copy.deepcopy(self.model).to(torch.bfloat16))

    def logprobs(
        self, tokens: Sequence[int], targets: Sequence[int], temperature: float = 1.0
    ) -> torch.Tensor:
        """Returns the log-probability of every target, [N], differentiable."""
        return target_logprobs(self.model, tokens, targets, temperature)

    def all_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Returns the logits, [N, V], differentiable."""
        return _logits(self.model, tokens)

    def all_logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """Returns all log-probabilities, [N, V], differentiable."""
        return torch.log_softmax(self.all_logits(tokens), dim=-1)

    def gradients(self) -> dict[str, np.ndarray]:
        gradients = {
            name: np.asarray(parameter.grad.double().numpy()).copy()
            for name, parameter in self.parameters.items()
            if parameter.grad is not None
        }
        return of_single_modules(gradients, self.config)

    def weights(self) -> dict[str, np.ndarray]:
        weights = {
            name: parameter.detach().numpy().copy()
            for name, parameter in self.parameters.items()
        }
        return of_single_modules(weights, self.config)

    def save(self, folder: Path) -> None:
        """Writes a PEFT folder in f32 and continues with the rounded weights."""
        for parameter in self.parameters.values():
            parameter.data = parameter.data.float()
        self.model.save_pretrained(folder)
        for parameter in self.parameters.values():
            parameter.data = parameter.data.double()

    def cross_entropy_backward(self, data: Sequence[Any]) -> float:
        """Adds the gradient of the summed loss of the data, and returns this loss."""
        return self.scored_backward(data)[0]

    def step(self, data: Sequence[Any]) -> Step:
        """Returns the results of data. No gradient may be there yet."""
        loss, logprobs = self.scored_backward(data)
        return Step(loss, logprobs, self.gradients())

    def scored_backward(self, data: Sequence[Any]) -> tuple[float, list[np.ndarray]]:
        """Like cross_entropy_backward, but also returns each datum's
        log-probabilities [N]."""
        total, scores = 0.0, []
        for datum in data:
            weights = torch.ones(len(datum.targets))
            if datum.weights is not None:
                weights = torch.tensor(np.asarray(datum.weights), dtype=torch.float64)
            logprobs = self.logprobs(datum.tokens, datum.targets)
            loss = -(weights * logprobs).sum()
            loss.backward()
            total += float(loss.detach())
            scores.append(np.asarray(logprobs.detach().numpy()))
        return total, scores


def target_logprobs(
    model: Any, tokens: Sequence[int], targets: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Returns the log-probability of every target, [N], differentiable."""
    scores = torch.log_softmax(_logits(model, tokens) / temperature, dim=-1)
    index = torch.tensor(np.asarray(targets, dtype=np.int64))
    return scores.gather(1, index[:, None])[:, 0]


def of_single_modules(
    tensors: dict[str, np.ndarray], config: Any
) -> dict[str, np.ndarray]:
    """Returns A and B of the modules to which the daemon gives LoRA."""
    return fused.of_parts(experts.of_single_experts(tensors, config), config)


def _logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    ids = torch.tensor(np.asarray(tokens, dtype=np.int64))
    return model(ids[None], use_cache=False).logits[0].double()


def _as_list(value: int | list[int] | None) -> list[int]:
    return [value] if isinstance(value, int) else list(value or [])


def _plain_name(name: str) -> str:
    """Returns the name of a parameter in PEFT files, without PEFT's prefix and that of
    a wrapped decoder, such as `model.layers.0.self_attn.q_proj.lora_A.weight`."""
    plain = name.removeprefix(PEFT_PREFIX).replace(".default.", ".")
    plain = plain.replace("model.language_model.", "model.")
    return plain.removesuffix(".default")


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """Returns A and B of a PEFT folder by plain name, without copies of the base."""
    tensors = load_file(folder / "adapter_model.safetensors")
    return {
        _plain_name(name): value for name, value in tensors.items() if ".lora_" in name
    }
