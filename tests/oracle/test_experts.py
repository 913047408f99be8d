"""Tests adapters that peft makes for the fused parameters of experts in transformers 5,
and the rank that the server gives to experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tolerance
import torch
from conftest import model_folder
from peft import LoraConfig, get_peft_model
from texts import next_token, random_tokens, sequences

PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FUSED: dict[str, dict[str, Any]] = {
    "both and attention": {
        "target_modules": ["q_proj"],
        "target_parameters": PARAMETERS,
    },
    "gate and up alone": {"target_modules": [], "target_parameters": PARAMETERS[:1]},
    "down alone": {"target_modules": [], "target_parameters": ["experts.down_proj"]},
    "two ranks": {
        "target_modules": ["v_proj"],
        "target_parameters": PARAMETERS,
        "rank_pattern": {r".*\.gate_up_proj": 6},
        "alpha_pattern": {r".*\.gate_up_proj": 24},
    },
}


def write_fused(reference: Any, folder: Path, fields: dict[str, Any]) -> Path:
    torch.manual_seed(9)
    model = get_peft_model(
        reference.model, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **fields)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.05)
            if "lora_" in name:
                parameter.data = parameter.data.float()
    model.save_pretrained(folder)
    reference.model = model.unload()
    return folder


@pytest.mark.parametrize("form", FUSED)
@pytest.mark.parametrize("kind", ("qwen3-moe", "mixtral", "gpt-oss", "minimax-m2"))
def test_fused_adapters_return(
    kind: str, form: str, both_for: Any, unique: Any, tmp_path: Path
) -> None:
    reference, daemon = both_for(kind)
    tokens = sequences(kind, model_folder(kind), reference.vocab)[0]
    folder = write_fused(reference, tmp_path / "fused", FUSED[form])
    exported = tmp_path / "single"
    with daemon.client() as client:
        adapter = client.import_adapter(unique("fused"), folder)
        measured = np.asarray(adapter.forward([next_token(tokens)]).results[0].logprobs)
        adapter.export(exported)
    for path in (folder, exported):
        with reference.adapter(path) as adapted:
            expected = adapted.logprobs(tokens[:-1], tokens[1:]).detach().numpy()
        tolerance.assert_near(measured, expected, tolerance.LOGPROBS, path.name)
    base = reference.logprobs(tokens[:-1], tokens[1:])
    assert tolerance.max_difference(measured, base) > 1e-3


def test_a_token_s_experts_share_the_rank(
    daemon_for: Any, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    kind = "qwen3-moe"
    per_token = experts_per_token(reference_for(kind))
    with daemon_for(kind).client() as client:
        for expert_rank, expected in ((None, 8 // per_token), (3, 3)):
            adapter = client.create_adapter(
                unique("shared"), rank=8, alpha=16.0, expert_rank=expert_rank
            )
            folder = tmp_path / str(expected)
            adapter.export(folder)
            config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
            assert (config["r"], config["lora_alpha"]) == (8, 16.0)
            path = "model.layers.0.mlp.experts.down_proj"
            assert config["rank_pattern"][path] == expected
            assert config["alpha_pattern"][path] == 16.0 * expected / 8
            with reference_for(kind).adapter(folder) as adapted:
                weights = adapted.weights()
            assert any("experts.5.up_proj" in name for name in weights)


def experts_per_token(reference: Any) -> int:
    return int(reference.config.num_experts_per_tok)


@pytest.mark.parametrize("kind", ("qwen3-moe", "gpt-oss"))
def test_a_checkpoint_of_experts_returns(
    kind: str, daemon_for: Any, unique: Any
) -> None:
    """In a file for gpt-oss, gate and up share one pair of A and B with twice the
    rank. A reader recognizes this form by zeros in B. After 0 steps, all of B is
    zero, and the reader must still recognize the form."""
    data = [next_token(random_tokens(320, 30, 3))]
    with daemon_for(kind).client() as client:
        for steps in (0, 2):
            adapter = client.create_adapter(unique("halves"), rank=8)
            for _ in range(steps):
                adapter.forward_backward(data)
                adapter.optim_step(learning_rate=1e-2)
            adapter.save("now")
            copy = client.create_adapter(unique("copy"), rank=8)
            copy.load("now", source=adapter.id)
            for which in (adapter, copy):
                which.forward_backward(data)
                which.optim_step(learning_rate=1e-2)
            ours, theirs = (
                np.asarray(which.forward(data).results[0].logprobs)
                for which in (adapter, copy)
            )
            np.testing.assert_array_equal(ours, theirs)
