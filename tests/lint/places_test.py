"""Tests that a new loss, sampling option or family is in all the places that
CONTRIBUTING.md names for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTO = "proto/weft/v1/"
TYPES = "client/python/weft/types.py"


def text(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


def snake(name: str) -> str:
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", name.removeprefix("k")).lower()


def losses() -> list[str]:
    body = text("src/request/loss_config.h").partition("enum class LossFunction")[2]
    return [snake(one) for one in re.findall(r"\bk\w+", body.partition("}")[0])]


def families() -> list[str]:
    return re.findall(
        r'\.model_type = "(\w+)"', text("src/model_config/family_config.cc")
    )


def sampling_options() -> list[str]:
    body = text(PROTO + "sampling.proto").partition("message SamplingConfig {")[2]
    fields = re.findall(
        r"^  [\w ]+ (\w+) = \d+;", body.partition("\n}")[0], re.MULTILINE
    )
    return [name for name in fields if name != "stop"]  # Clients have it in parts.


def test_the_lists_are_read() -> None:
    assert {"cross_entropy", "stable_reinforce", "js"} <= set(losses())
    assert {"llama", "qwen3_5_moe_text"} <= set(families())
    assert {"max_tokens", "min_p", "logit_bias"} <= set(sampling_options())


@pytest.mark.parametrize("name", losses())
def test_a_loss_is_everywhere(name: str) -> None:
    number = losses().index(name) + 1  # 0 in the proto is no loss.
    assert f"  LOSS_FUNCTION_{name.upper()} = {number};" in text(
        PROTO + "training.proto"
    )
    for path in ("client/python/weft/aio_adapter.py", "client/python/README.md"):
        assert re.search(rf"\b{name}\b", text(path)), path


@pytest.mark.parametrize("name", sampling_options())
def test_a_sampling_option_is_everywhere(name: str) -> None:
    places = ("src/request/sample.h", "server/wire/sample_validation.cc", TYPES)
    for path in places:
        assert re.search(rf"\b{name}\b", text(path)), path


@pytest.mark.parametrize("name", families())
def test_a_family_is_everywhere(name: str) -> None:
    assert f'"architecture": "{name}"' in text("tests/oracle/models.py")
    # The table has the names in config.json, so the wrappers of text models.
    assert f"`{name.removesuffix('_text')}" in text("README.md")
