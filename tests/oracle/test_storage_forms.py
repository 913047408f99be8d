"""Tests every family from every form and dtype on disk. All forms and dtypes give the
same bits as f32, and one of them gives the results of transformers + peft on weights
that are rounded to the dtype."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
import forms
import numpy as np
import pytest
import tolerance
import torch
from conftest import DigestOf
from daemon import BUILD_DIR, Daemon
from models import SMALL_SHARD, tiny_model
from reference import ALL_LINEAR, AdapterShape, Reference
from safetensors.torch import load
from texts import next_token, random_tokens
from transformers import AutoModelForCausalLM

DUMP = BUILD_DIR / "tests" / "oracle" / "dump_weights"
KINDS = (
    "llama-tied",
    "llama3-rope",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma3-wrapped",
)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
EVERYWHERE = AdapterShape(4, 8.0, (*ALL_LINEAR, "lm_head"))
LENGTHS = (41, 2, 19)  # The windows are shorter than the first sequence.


@dataclass(frozen=True)
class Oracle:
    """A model rounded to a dtype, with the results of transformers and peft."""

    model: Any
    adapter: Path
    tokens: list[list[int]]
    base_logprobs: list[np.ndarray]  # Each is [N, V].
    adapted_logprobs: list[np.ndarray]  # Each is [N].
    gradients: dict[str, np.ndarray]


def _oracle(kind: str, dtype: torch.dtype, root: Path) -> Oracle:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype=dtype)
    reference = Reference(
        forms.write(model, root / "reference", "safetensors", SMALL_SHARD)
    )
    tokens = [random_tokens(reference.vocab, n, n) for n in LENGTHS]
    data = [next_token(sequence) for sequence in tokens]
    scores = [torch.tensor(reference.logits(d.tokens)) for d in data]
    folder = reference.make_adapter(root / "adapter", EVERYWHERE, seed=70)
    with reference.adapter(folder) as adapted:
        logprobs = [adapted.logprobs(d.tokens, d.targets) for d in data]
        adapted.cross_entropy_backward(data)
        return Oracle(
            model=model,
            adapter=folder,
            tokens=tokens,
            base_logprobs=[s.log_softmax(dim=-1).numpy() for s in scores],
            adapted_logprobs=[values.detach().numpy() for values in logprobs],
            gradients=adapted.gradients(),
        )


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_gives_the_same_bits(kind: str, tmp_path: Path) -> None:
    """Compares the weights that the decoder holds, for each dtype in each form with
    those of the same numbers in f32. Results depend only on these weights, and other
    tests compare those of models in f32."""
    made: list[Path] = []
    for name, dtype in DTYPES.items():
        model = AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype=dtype)
        for form in forms.FORMS:
            folder = tmp_path / f"{name}-{form}"
            forms.write(model, folder, form, SMALL_SHARD)
            assert {t.dtype for t in forms.read(folder).values()} == {dtype}
            made += (folder, tmp_path / f"{folder.name}.held")
        wide = tmp_path / f"{name}-wide"
        forms.write(model.float(), wide, "safetensors", SMALL_SHARD)
        made += (wide, tmp_path / f"{wide.name}.held")
    subprocess.run([DUMP, "f32", *made], check=True, timeout=120)
    for name in DTYPES:
        held = (tmp_path / f"{name}-wide.held").read_bytes()
        assert len(load(held)) > 9
        for form in forms.FORMS:
            assert (tmp_path / f"{name}-{form}.held").read_bytes() == held, (name, form)


# Each dtype and each form occurs at least twice.
@pytest.mark.parametrize(
    ("kind", "dtype", "form"),
    [*zip(KINDS, itertools.cycle(DTYPES), itertools.cycle(forms.FORMS), strict=False)],
)
def test_logits_and_gradients_are_the_references(
    kind: str, dtype: str, form: str, tmp_path: Path
) -> None:
    import weft

    oracle = _oracle(kind, DTYPES[dtype], tmp_path)
    folder = forms.write(oracle.model, tmp_path / "model", form, SMALL_SHARD)
    vocab = oracle.base_logprobs[0].shape[1]
    every_token = [
        weft.Datum(t[:-1], np.tile(np.arange(vocab), (len(t) - 1, 1)))
        for t in oracle.tokens
    ]
    with Daemon(folder, tmp_path / "weftd") as daemon, daemon.client() as client:
        base = client.forward(every_token)
        adapter = client.import_adapter("a", oracle.adapter)
        adapted = adapter.forward_backward([next_token(t) for t in oracle.tokens])
        gradients = checkpoints.gradients(daemon, adapter)
    for reply, expected in (
        (base, oracle.base_logprobs),
        (adapted, oracle.adapted_logprobs),
    ):
        for result, logprobs in zip(reply.results, expected, strict=True):
            measured = np.asarray(result.logprobs).reshape(logprobs.shape)
            tolerance.assert_near(measured, logprobs)
    tolerance.assert_tensors(gradients, oracle.gradients, tolerance.GRADIENTS)


def _parameters(state: dict[str, torch.Tensor], path: Path) -> None:
    """Saves a dict of Parameters with requires_grad."""
    torch.save({n: torch.nn.Parameter(t) for n, t in state.items()}, path)


def _one_storage(state: dict[str, torch.Tensor], path: Path) -> None:
    """Saves views of one flat buffer, by the newest pickle protocol."""
    flat = torch.cat([tensor.reshape(-1) for tensor in state.values()])
    views = torch.split(flat, [tensor.numel() for tensor in state.values()])
    torch.save(
        {n: v.view_as(t) for (n, t), v in zip(state.items(), views, strict=True)},
        path,
        pickle_protocol=5,
    )


class _Command:
    """An object whose unpickling runs a shell command and returns the result."""

    def __init__(self, command: str):
        self._command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


def _hostile(state: dict[str, torch.Tensor], path: Path) -> None:
    torch.save({**state, "x": _Command(f"touch {path.parent / 'was-here'}")}, path)


def _legacy(state: dict[str, torch.Tensor], path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


def _with_bin(
    kind: str, write: Callable[[dict[str, torch.Tensor], Path], None], folder: Path
) -> Path:
    """Makes a tiny model with one weight file, which `write` writes."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind))
    model.config.save_pretrained(folder)
    write(model.state_dict(), folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("write", (_parameters, _one_storage))
def test_other_ways_to_save_give_the_same_bits(
    write: Any, digest_of: DigestOf, tmp_path: Path
) -> None:
    folder = _with_bin("llama-bias", write, tmp_path / "model")
    assert digest_of(folder) == digest_of(tiny_model("llama-bias"))


@pytest.mark.parametrize(
    ("write", "message"),
    [(_hostile, "names 'posix system'"), (_legacy, "torch's old format")],
    ids=["command", "legacy"],
)
def test_refuses_to_start_with(write: Any, message: str, tmp_path: Path) -> None:
    folder = _with_bin("llama-tied", write, tmp_path / "model")
    daemon = Daemon(folder, tmp_path / "weftd")
    daemon.launch()
    assert daemon.wait() != 0
    log = daemon.log_tail()
    assert "pytorch_model.bin: " in log and message in log
    assert not (folder / "was-here").exists()
