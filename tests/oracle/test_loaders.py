"""Tests that exports for PEFT, vLLM and llama.cpp add the same to a model's weights,
for every family. test_peft_folders.py loads those for PEFT in PEFT."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loaders
import numpy as np
import pytest
import tolerance
from daemon import running
from loaders import Delta, Folder
from models import TINY, tiny_model
from reference import AdapterShape
from texts import next_token, random_tokens

import weft

# Its text part alone is in TINY.
WRAPPED_MOE = "qwen3-5-moe-wrapped"


def data() -> list[weft.Datum]:
    return [next_token(random_tokens(300, 24, 5))]


def assert_same(found: dict[str, Delta], expected: dict[str, Delta]) -> None:
    assert found.keys() == expected.keys()
    for path, delta in expected.items():
        difference = abs(found[path].values - delta.values)
        assert np.all(difference <= delta.bound), path


def check_loaders(adapter: weft.Adapter, folder: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text("utf-8"))
    text = config.get("text_config", config)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    num_experts = next((text[name] for name in names if name in text), 0)
    adapter.export(folder / "peft")
    expected = loaders.in_peft(Folder(folder / "peft"), num_experts)
    assert any(delta.values.any() for delta in expected.values())
    adapter.export(folder / "vllm", loader="vllm")
    in_vllm = loaders.in_vllm(
        Folder(folder / "vllm"), num_experts, config["model_type"], text is not config
    )
    assert_same(in_vllm, expected)
    if config["model_type"] in ("gpt_oss", "qwen3_vl_moe"):
        with pytest.raises(weft.FailedPrecondition, match="no name for LoRA of"):
            adapter.export(folder / "llama", loader="llama.cpp")
        return
    adapter.export(folder / "llama", loader="llama.cpp")
    in_llama = Folder(folder / "llama")
    assert len({pair.b.shape[1] for pair in in_llama.pairs.values()}) == 1
    assert_same(loaders.in_llama_cpp(in_llama), expected)
    # All three are right about it.
    assert_same(loaders.in_peft(in_llama, num_experts), expected)


def check_imports(
    client: weft.Client, adapter: weft.Adapter, unique: Any, folder: Path
) -> None:
    """Every export comes back as an adapter that computes the same."""
    results = adapter.forward(data()).results[0].logprobs
    for path in sorted(folder.iterdir()):
        again = client.import_adapter(unique("again"), path)
        tolerance.assert_near(again.forward(data()).results[0].logprobs, results)


@pytest.fixture(scope="module")
def wrapped_moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("wrapped") / "model"
    shutil.copytree(tiny_model("qwen3-5-moe"), folder)
    text = json.loads((folder / "config.json").read_text("utf-8"))
    wrapper = {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "text_config": text,
    }
    (folder / "config.json").write_text(json.dumps(wrapper), "utf-8")
    with running(folder, folder.parent / "weftd") as daemon:
        yield folder, daemon


@pytest.mark.parametrize("kind", (*TINY, WRAPPED_MOE))
def test_programs_add_the_same(
    kind: str, daemon_for: Any, unique: Any, tmp_path: Path, request: Any
) -> None:
    if kind == WRAPPED_MOE:
        model, daemon = request.getfixturevalue("wrapped_moe")
    else:
        model, daemon = tiny_model(kind), daemon_for(kind)
    with daemon.client() as client:
        adapter = client.create_adapter(unique("loader"), rank=6, alpha=9.0, seed=2)
        for _ in range(2):
            adapter.forward_backward(data())
            adapter.optim_step(learning_rate=1e-2)
        check_loaders(adapter, tmp_path, model)
        check_imports(client, adapter, unique, tmp_path)


@pytest.mark.parametrize("kind", ("llama-tied", "qwen3-moe", "qwen2-moe"))
def test_an_adapter_without_training_comes_back(
    kind: str, daemon_for: Any, unique: Any, tmp_path: Path
) -> None:
    """B is zero, so it does not say which of its columns are gate's and up's."""
    with daemon_for(kind).client() as client:
        adapter = client.create_adapter(unique("new"), rank=4, seed=3)
        adapter.export(tmp_path / "new")
        again = client.import_adapter(unique("again"), tmp_path / "new")
        assert again.info().num_parameters == adapter.info().num_parameters


def test_modules_with_other_scales(both_for: Any, unique: Any, tmp_path: Path) -> None:
    """Only PEFT knows an alpha for each module."""
    kind = "llama-tied"
    reference, daemon = both_for(kind)
    shape = AdapterShape(4, 6.0, ("q_proj", "up_proj", "o_proj"), False)
    folder = reference.make_adapter(tmp_path / "start", shape, seed=8)
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    config["alpha_pattern"] = {"layers.1.self_attn.q_proj": 5.0, "up_proj": 1.0}
    (folder / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    with daemon.client() as client:
        adapter = client.import_adapter(unique("scales"), folder)
        adapter.forward_backward(data())
        adapter.optim_step(learning_rate=1e-2)
        (tmp_path / "out").mkdir()
        check_loaders(adapter, tmp_path / "out", tiny_model(kind))
        check_imports(client, adapter, unique, tmp_path / "out")
