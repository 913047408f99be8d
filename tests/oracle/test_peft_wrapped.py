"""Tests PEFT folders of a model that also reads images. In transformers' class the
decoder is a part of the model, so the names in PEFT's files have this part."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tolerance
import torch
from models import tiny_model
from peft import LoraConfig, PeftModel, get_peft_model
from reference import target_logprobs
from safetensors.numpy import load_file, save_file
from texts import next_token, random_tokens
from transformers import AutoModelForCausalLM

import weft

KIND = "gemma3-wrapped"
EXPRESSION = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
NAMES = ["q_proj", "v_proj", "down_proj"]


def model() -> Any:
    """Returns the class that config.json names, in f64."""
    loaded = AutoModelForCausalLM.from_pretrained(
        tiny_model(KIND), dtype=torch.float32, attn_implementation="eager"
    )
    assert hasattr(loaded.model, "language_model")
    return loaded.eval().double()


def data(vocab: int = 320) -> list[Any]:
    return [next_token(random_tokens(vocab, 20 + 9 * seed, seed)) for seed in range(2)]


def assert_equal(adapted: Any, results: Any) -> None:
    for datum, result in zip(data(), results, strict=True):
        expected = target_logprobs(adapted, datum.tokens, datum.targets)
        tolerance.assert_near(result.logprobs, expected.detach().numpy())


def make_adapter(folder: Path, targets: Any, image_parts: bool = False) -> Any:
    """Returns PEFT's model with random A and B, which `folder` has, too. B of the
    image parts is 0, as training on text leaves it, unless `image_parts`."""
    torch.manual_seed(3)
    adapted = get_peft_model(
        model(), LoraConfig(r=4, lora_alpha=8.0, target_modules=targets)
    )
    for name, parameter in adapted.named_parameters():
        if "lora_" in name and ("language_model" in name or image_parts):
            parameter.data.normal_(0.0, 0.1)
    adapted.float().save_pretrained(folder)
    return adapted.double()


def test_peft_loads_an_export_over_the_models_own_class(
    daemon_for: Any, unique: Any, tmp_path: Path
) -> None:
    with daemon_for(KIND).client() as client:
        targets = ["q_proj", "o_proj", "up_proj", "embed_tokens", "lm_head"]
        adapter = client.create_adapter(
            unique("out"), rank=4, target_modules=targets, seed=1
        )
        for _ in range(3):
            adapter.forward_backward(data())
            adapter.optim_step(learning_rate=1e-2)
        before = client.forward(data()).results
        trained = adapter.forward(data()).results
        adapter.export(tmp_path / "peft")
        again = client.import_adapter(unique("again"), tmp_path / "peft")
        for one, other in zip(again.forward(data()).results, trained, strict=True):
            np.testing.assert_array_equal(one.logprobs, other.logprobs)
    # The adapter does something, so that names that match nothing would be seen.
    moved = tolerance.max_difference(trained[0].logprobs, before[0].logprobs)
    assert moved > 100 * tolerance.LOGPROBS
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        adapted = PeftModel.from_pretrained(model(), tmp_path / "peft").double()
    names = [name for name, _ in adapted.named_parameters() if "lora_" in name]
    assert names and not any("vision" in name for name in names)
    assert_equal(adapted, trained)


@pytest.mark.parametrize("targets", [EXPRESSION, NAMES], ids=["expression", "names"])
def test_an_adapter_of_the_models_own_class_is_imported(
    daemon_for: Any, unique: Any, tmp_path: Path, targets: Any
) -> None:
    adapted = make_adapter(tmp_path / "peft", targets)
    with daemon_for(KIND).client() as client:
        imported = client.import_adapter(unique("in"), tmp_path / "peft")
        assert_equal(adapted, imported.forward(data()).results)
        # Releases of transformers before 4.52 have other names, and adapters of the
        # decoder alone have plain ones.
        tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
        for prefix in ("language_model.model.", "model."):
            other = tmp_path / prefix
            shutil.copytree(tmp_path / "peft", other)
            renamed = {
                name.replace("model.language_model.", prefix): value
                for name, value in tensors.items()
                if "vision" not in name
            }
            save_file(renamed, other / "adapter_model.safetensors")
            if targets == EXPRESSION and prefix == "model.":
                path = other / "adapter_config.json"
                config = json.loads(path.read_text())
                config["target_modules"] = EXPRESSION.replace("language_", "")
                path.write_text(json.dumps(config))
            imported = client.import_adapter(unique("in"), other)
            assert_equal(adapted, imported.forward(data()).results)


def test_an_adapter_that_changes_the_image_parts_is_refused(
    daemon_for: Any, unique: Any, tmp_path: Path
) -> None:
    make_adapter(tmp_path / "peft", NAMES, image_parts=True)
    with (
        daemon_for(KIND).client() as client,
        pytest.raises(weft.InvalidArgument, match=r"vision_tower.*reads images"),
    ):
        client.import_adapter(unique("in"), tmp_path / "peft")
