"""Compares ten steps of AdamW and of Muon with torch.optim on peft."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tolerance
import torch
from batching import together
from conftest import SHORT_SMOLLM2, model_folder
from reference import mixed_shapes, of_single_modules, read_weights
from texts import next_token, sequences

STEPS = 10


@dataclass(frozen=True)
class Optimizer:
    """The values of weft's optim_step and their meaning for torch."""

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    # If an element's gradient is below f32's rounding error, two programs do
    # not agree on its sign. With a much smaller eps, AdamW makes a whole step
    # of this sign, and one such element already exceeds the bound.
    eps: float = 1e-6
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0

    def torch(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters,
            lr=self.learning_rate,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
        )


@dataclass(frozen=True)
class Muon:
    """The same for Muon."""

    optimizer: str = "muon"
    # Large enough that a wrong term would exceed the bound.
    learning_rate: float = 1e-2
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.0
    ns_steps: int = 5
    max_grad_norm: float = 0.0

    def torch(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon(
            parameters,
            lr=self.learning_rate,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            nesterov=self.nesterov,
            ns_steps=self.ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )


PLAIN = Optimizer()
DECAYED = Optimizer(learning_rate=2e-3, weight_decay=0.1)
CLIPPED = Optimizer(beta2=0.999, weight_decay=0.05, max_grad_norm=0.5)


@pytest.mark.parametrize(
    "kind",
    (
        SHORT_SMOLLM2,
        "qwen3",
        "llama3-rope",
        "qwen3-moe",
        "gpt-oss",
        "olmo3",
        "granite",
        "phi3",
        "glm4",
        "qwen3-vl",
        "qwen3-5",
        "qwen3-next",
    ),
)
def test_weights_after_ten_steps_of_three_adapters(
    kind: str, both_for: Any, unique: Any, tmp_path: Path
) -> None:
    values = (PLAIN, DECAYED, CLIPPED)
    check_ten_steps(kind, values, both_for, unique, tmp_path)


@pytest.mark.parametrize("kind", ("qwen3", "olmo3", "qwen3-5"))
def test_weights_after_ten_steps_of_muon(
    kind: str,
    both_for: Any,
    unique: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch orthogonalizes in bf16. Without that its code is an exact reference.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    values = (
        Muon(),
        Muon(learning_rate=2e-2, momentum=0.5, weight_decay=0.1, ns_steps=3),
        Muon(nesterov=False, max_grad_norm=0.5),
    )
    check_ten_steps(kind, values, both_for, unique, tmp_path)


def check_ten_steps(
    kind: str,
    values: tuple[Optimizer | Muon, ...],
    both_for: Any,
    unique: Any,
    tmp_path: Path,
) -> None:
    reference, daemon = both_for(kind)
    tokens = sequences(kind, model_folder(kind), reference.vocab)
    # SmolLM2 gets short texts and few steps, because the model itself is large. What
    # depends on the number of steps does not depend on the model.
    length, steps = (9, 4) if kind == SHORT_SMOLLM2 else (24, STEPS)
    tokens = [t[:length] for t in tokens if len(t) > 8]
    shapes = mixed_shapes(kind)
    batches = [
        [[next_token(tokens[(i + s) % len(tokens)])] for s in range(steps)]
        for i in range(len(shapes))
    ]
    folders = [tmp_path / str(i) for i in range(len(shapes))]
    wanted = []
    for index, shape in enumerate(shapes):
        with reference.new_adapter(folders[index], shape, seed=60 + index) as adapted:
            norms = _train_reference(adapted, batches[index], values[index])
            wanted.append((norms, adapted.weights()))
    with daemon.client() as client:
        adapters = [client.import_adapter(unique("trained"), f) for f in folders]
        norms_of = together(
            client,
            [
                partial(_train, a, b, o)
                for a, b, o in zip(adapters, batches, values, strict=True)
            ],
        )
        for index, adapter in enumerate(adapters):
            adapter.export(tmp_path / f"trained-{index}")
    for index, (expected_norms, expected) in enumerate(wanted):
        exported = read_weights(tmp_path / f"trained-{index}")
        trained = of_single_modules(exported, reference.config)
        assert norms_of[index] == pytest.approx(expected_norms, rel=1e-3)
        tolerance.assert_tensors(trained, expected, tolerance.TRAINED_WEIGHTS)


def _train(adapter: Any, batches: Any, values: Optimizer | Muon) -> list[float]:
    """Returns the gradient norms of the steps, before clipping."""
    norms = []
    for batch in batches:
        adapter.forward_backward(batch)
        norms.append(adapter.optim_step(**vars(values)).grad_norm)
    return norms


def _train_reference(
    adapted: Any, batches: Any, values: Optimizer | Muon
) -> list[float]:
    parameters = list(adapted.parameters.values())
    optimizer = values.torch(parameters)
    norms = []
    for batch in batches:
        optimizer.zero_grad()
        adapted.cross_entropy_backward(batch)
        limit = values.max_grad_norm or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, limit)))
        optimizer.step()
    return norms
