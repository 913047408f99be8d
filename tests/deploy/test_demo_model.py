"""Compares the demo model with transformers: weights bit for bit, tokens id for id."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import gguf
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

ROOT = Path(__file__).resolve().parents[2]


def load_script() -> ModuleType:
    path = ROOT / "deploy" / "prepare_demo_model.py"
    spec = importlib.util.spec_from_file_location("prepare_demo_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SCRIPT = load_script()
GGUF = SCRIPT.find_gguf()


@pytest.fixture(scope="module", autouse=True)
def read_once() -> Iterator[None]:
    """Lets transformers read the GGUF file once instead of four times, and make the map
    of names once instead of for each module."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, cache(getattr(gguf, name)))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "single"
    assert SCRIPT.prepare(out, GGUF)
    return out


@pytest.fixture(scope="module")
def ours(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def theirs() -> PreTrainedModel:
    """Returns the model that transformers reads from the GGUF file."""
    return AutoModelForCausalLM.from_pretrained(
        GGUF.parent, gguf_file=GGUF.name, dtype=torch.float32
    )


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def their_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(GGUF.parent, gguf_file=GGUF.name)


def test_weights_equal_transformers_bit_for_bit(
    ours: PreTrainedModel, theirs: PreTrainedModel
) -> None:
    state, oracle = ours.state_dict(), theirs.state_dict()
    assert ours.dtype == torch.float32
    assert state.keys() == oracle.keys()
    assert not [key for key in state if not torch.equal(state[key], oracle[key])]


def test_config_says_what_transformers_reads_from_the_gguf(
    ours: PreTrainedModel, theirs: PreTrainedModel
) -> None:
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "vocab_size",
        "bos_token_id",
        "eos_token_id",
        "tie_word_embeddings",
    ):
        assert getattr(ours.config, name) == getattr(theirs.config, name), name
    assert ours.config.rope_parameters["rope_theta"] == pytest.approx(100000.0)
    assert ours.config.rms_norm_eps == pytest.approx(1e-5)


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "It was 1984; 12345 + 67890 = 80235, or 3.14159.",
        "  two spaces\n\n\tand a tab  ",
        "naïve café — 東京の夜 🎉🏽",
        "don't we'll I'm they've HE'S",
        "for (int i = 0; i < n; ++i) { x[i] += 2.5e-3; }",
        "<|im_start|>user\nTell me about the rain.<|im_end|>\n",
        "a<|endoftext|>b",
        "",
    ],
)
def test_tokenizer_gives_the_ids_of_transformers(
    tokenizer: PreTrainedTokenizerBase,
    their_tokenizer: PreTrainedTokenizerBase,
    text: str,
) -> None:
    ids = tokenizer(text).input_ids
    assert ids == their_tokenizer(text).input_ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_chat_template_opens_with_the_system_prompt(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert isinstance(text, str)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_second_run_writes_nothing(folder: Path) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert not SCRIPT.prepare(folder, GGUF)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_never_replaces_a_folder_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(SystemExit, match="was not made by this script"):
        SCRIPT.prepare(tmp_path, GGUF)
    assert (tmp_path / "mine.txt").read_text() == "keep me"
