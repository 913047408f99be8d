"""Compares a daemon that holds its base weights in 8 bits with transformers + peft,
whose base weights are rounded in the same way.

Both sides have the same rounded weights, and nothing else is rounded to less than
f32. So the comparison has the bounds of f32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import daemon as daemon_module
import numpy as np
import pytest
import tolerance
import torch
from batching import together
from conftest import SMOLLM2, model_folder
from parallel import SIZES, need_devices
from reference import MIXED, MIXED_EXPERTS, Reference, mixed_shapes
from test_gradients import assert_gradients
from texts import next_token, passages, random_tokens, sequences

GROUP = 64
INT8 = ("--weights", "int8")
# Products whose inputs are split over ranks.
SUMMED = ("o_proj.weight", "down_proj.weight", "out_proj.weight")
# Matrices that are not rounded.
EXACT = ("mlp.gate.weight", "shared_expert_gate.weight", "conv1d.weight")
ADAPTERS = {"qwen3-moe": MIXED_EXPERTS[2], "qwen3-5": mixed_shapes("qwen3-5")[2]}
GREEDY_TOKENS = 32

pytestmark = pytest.mark.skipif(
    daemon_module.DEVICE == "cuda", reason="CUDA multiplies 8 bits in bf16"
)


def round_in_place(weight: torch.Tensor, ranks: int) -> None:
    """Rounds a weight [rows, ..., inputs] in f64 to 8 bits. Each of `ranks` ranks
    rounds its part of the inputs."""
    for rows in weight.split(4096):  # Their groups stay in the processor's cache.
        for part in rows.chunk(ranks, dim=-1):
            for group in part.split(GROUP, dim=-1):
                group.copy_(_rounded_group(group.float()))


def _rounded_group(group: torch.Tensor) -> torch.Tensor:
    scale = (group.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=2.0**-126)
    # Rounds the scale up to bf16.
    bits = scale.view(torch.int32)
    scale = ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)
    return torch.round(group / scale).double() * scale.double()


class RoundedReference(Reference):
    """A model with rounded matrices. Routers and vectors are not rounded."""

    # A daemon refuses rounded rows of the head: they differ from the checkpoint's.
    save_embedding_layers = False

    def __init__(self, kind: str, ranks: int = 1):
        super().__init__(model_folder(kind))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter.dim() < 2 or name.endswith(EXACT):
                    continue
                round_in_place(parameter, ranks if name.endswith(SUMMED) else 1)


@pytest.fixture(scope="module")
def daemon_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Returns a function that starts a daemon. It runs until the module's tests end."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def start(kind: str, *flags: str) -> daemon_module.Daemon:
            folder = tmp_path_factory.mktemp("weftd-int8")
            return stack.enter_context(
                daemon_module.running(model_folder(kind), folder, *INT8, *flags)
            )

        yield start


def likeliest(reference: Reference, prompt: list[int], drawn: list[int]) -> list[int]:
    """Returns the likeliest token at each place of `drawn`, after those before it.
    They are `drawn` only if greedy decoding draws these tokens."""
    logits = reference.logits([*prompt, *drawn[:-1]])
    return [int(token) for token in logits[len(prompt) - 1 :].argmax(-1)]


def expect_results(
    daemon: Any, reference: Reference, kind: str, name: str, folder: Path
) -> None:
    """Compares log-probabilities, gradients and likeliest tokens, with an adapter
    that also trains the head."""
    tokens = sequences(kind, model_folder(kind), reference.vocab)
    shape = ADAPTERS.get(kind, MIXED[2])
    path = reference.make_adapter(folder, shape, seed=70)
    data = [next_token(t) for t in tokens]
    prompts = [random_tokens(reference.vocab, 9, seed) for seed in range(3)]
    with daemon.client() as client:
        assert client.info().model.dtype == "int8"
        base = client.forward(data).results
        adapter = client.import_adapter(name, path)
        reply = adapter.forward_backward(data)
        measured = checkpoints.gradients(daemon, adapter)
        values: dict[str, Any] = {"max_tokens": GREEDY_TOKENS, "temperature": 0.0}
        drawn = together(
            client,
            [partial(client.sample, p, ignore_eos=True, **values) for p in prompts],
        )
    for sequence, result in zip(tokens, base, strict=True):
        wanted = reference.logprobs(sequence[:-1], sequence[1:])
        tolerance.assert_near(
            result.logprobs, wanted, tolerance.LOGPROBS, f"length {len(sequence)}"
        )
    with reference.adapter(path) as adapted:
        loss, scores = adapted.scored_backward(data)
        assert_gradients(measured, adapted.gradients())
    for result, wanted in zip(reply.results, scores, strict=True):
        tolerance.assert_near(result.logprobs, wanted)
    assert reply.metrics["loss:sum"] == pytest.approx(loss, rel=tolerance.GRADIENTS)
    for prompt, result in zip(prompts, drawn, strict=True):
        chosen = list(result.samples[0].tokens)
        assert len(chosen) == GREEDY_TOKENS
        assert chosen == likeliest(reference, prompt, chosen)


@pytest.mark.parametrize(
    "kind", ("llama-untied", "gemma2", "qwen3-moe", "qwen3-5", "phi3-partial")
)
def test_is_the_model_of_the_rounded_weights(
    kind: str, daemon_of: Any, reference_for: Any, tmp_path: Path
) -> None:
    daemon, reference = daemon_of(kind), RoundedReference(kind)
    expect_results(daemon, reference, kind, "int8", tmp_path / "a")
    # The weights were indeed rounded.
    tokens = sequences(kind, model_folder(kind), reference.vocab)[0]
    exact = reference_for(kind).logprobs(tokens[:-1], tokens[1:])
    moved = tolerance.max_difference(reference.logprobs(tokens[:-1], tokens[1:]), exact)
    assert moved > 10 * tolerance.LOGPROBS


def test_each_rank_rounds_its_own_inputs(daemon_of: Any, tmp_path: Path) -> None:
    """Two ranks have the same bounds as one rank. But they split the inputs of a weight
    into other groups, so the reference rounds the weight in these groups."""
    kind, flags = "llama-tied", SIZES["tensor 2"]
    need_devices(flags)
    daemon = daemon_of(kind, *flags)
    expect_results(daemon, RoundedReference(kind, 2), kind, "ranks", tmp_path / "a")


def test_demo_model_in_less_memory_than_bf16(tmp_path: Path) -> None:
    folder = model_folder(SMOLLM2)
    peaks = {}
    for flags in (("--dtype", "bf16"), INT8):
        with daemon_module.running(folder, tmp_path / flags[1], *flags) as daemon:
            peaks[flags[1]] = daemon.peak_resident_bytes()
            if flags == INT8:
                with daemon.client() as client:
                    results = [
                        client.sample(
                            p[:12],
                            max_tokens=GREEDY_TOKENS,
                            temperature=0.0,
                            ignore_eos=True,
                        )
                        for p in passages(folder)[:2]
                    ]
    # The weights take 269 MB in bf16 and 139 MB in 8 bits.
    assert peaks["int8"] < peaks["bf16"] - 50e6
    reference = RoundedReference(SMOLLM2)
    for passage, result in zip(passages(folder), results, strict=False):
        chosen = list(result.samples[0].tokens)
        assert len(chosen) == GREEDY_TOKENS
        assert chosen == likeliest(reference, passage[:12], chosen)


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = model_folder("llama-tied")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name][2, 3] = np.nan
    save_file(tensors, path, metadata={"format": "pt"})
    daemon = daemon_module.Daemon(tmp_path, tmp_path / "run", *INT8)
    daemon.launch()
    assert daemon.wait() != 0
    assert f"'{name}' has a number that is not finite" in daemon.log_tail()


def test_random_weights_may_be_in_8_bits(tmp_path: Path) -> None:
    folder = model_folder("llama-tied")
    flags = (*INT8, "--load-format", "dummy")
    with daemon_module.running(folder, tmp_path / "run", *flags) as daemon:
        with daemon.client() as client:
            reply = client.forward([next_token([3, 1, 4, 1, 5, 9])])
        assert np.isfinite(reply.results[0].logprobs).all()
