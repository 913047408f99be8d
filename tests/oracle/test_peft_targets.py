"""Tests that regular expressions of adapter_config.json select the same modules as
in peft."""

from __future__ import annotations

import json
import random
import re
import subprocess
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from daemon import BUILD_DIR
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from transformers import LlamaConfig, LlamaForCausalLM

PROGRAM = BUILD_DIR / "tests" / "oracle" / "peft_targets"
LAYERS = 12
RANK, ALPHA = 8, 16

# An expression like those that Unsloth writes.
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)"
    r".*?(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn)"
    r"\.(?:(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)))"
)
TARGETS = (
    r".*_proj",
    r".*\.(q|v)_proj",
    r".*q_proj$",
    r"^.*[kv]_proj",
    r"model\.layers\.(1|11)\.self_attn\.q_proj",
    r"model\.layers\.\d\.mlp\.(gate|up|down)_proj",
    r"model\.layers\.([5-9]|1[01])\..*_proj",
    r"model\.layers\.\d{2}\.self_attn\.[^.]+",
    r"(?i).*Q_PROJ",
    r".*(?i:Up)_proj",
    r"(lm_head|.*embed_tokens)",
    r"lm.head|model.embed.tokens",
    r"(?P<layer>.*)\bo_proj\b",
    r"\Amodel.*\W0\W.*_proj",
    UNSLOTH,
    "all-linear",
    "All-Linear",
    ["q_proj", "up_proj", "lm_head"],
    ["1.self_attn.q_proj", "model.layers.2.mlp.up_proj"],
    # A list holds names, so these expressions match nothing.
    [r".*q_proj"],
    ["q_pro."],
    # Each of these matches no module, or some module that is not a linear layer.
    "q_proj",
    "q_proj|v_proj",
    ".*q_proj\n",
    "",
    ".*",
    "model.layers.1.*",
    ".*(norm|q_proj)",
    ".*(mlp|q_proj)",
)
PATTERNS: tuple[dict[str, int], ...] = (
    {r"(q|k)_proj": 2, "v_proj": 4},
    {r".*\.1\..*": 2, r"layers\.\d\..*": 3, r"[a-z]_proj": 4},
    {r"model\.layers\.(0|2)\.mlp\.\w+": 3},
    {"^lm_head": 2, "^q_proj": 3, "model.embed_tokens|o_proj": 5},
    {r"[qk]_proj|1\.self_attn\.v_proj": 2, r"\d\.mlp\.up_proj$": 6},
    # peft puts each key into a group of an expression. This key closes the group.
    {"model)|(lm_head": 2},
    {"": 2, ".": 3, "lm_hea": 4, "nothing.*": 5, "q_proj": 6},
)


@pytest.fixture(scope="module")
def model() -> Any:
    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=8,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        make: Any = LlamaForCausalLM
        return make(config)


def ours(configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines = [
        json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, **config})
        for config in configs
    ]
    done = subprocess.run(
        [PROGRAM, str(LAYERS)],
        input="\n".join(lines) + "\n",
        text=True,
        capture_output=True,
        check=True,
        timeout=120,
    )
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(replies) == len(configs)
    return replies


def adapt(model: LlamaForCausalLM, fields: dict[str, Any]) -> Any:
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(model, config, low_cpu_mem_usage=True)


def pefts(model: LlamaForCausalLM, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns what peft adapts: {path: [rank, alpha]}, or {} if it refuses."""
    try:
        adapted = adapt(model, fields)
    except ValueError:
        # Some layers are adapted already, and the next unload() restores them.
        adapt(model, {"target_modules": ["lm_head"]}).unload()
        return {}
    try:
        return {
            path.removeprefix("base_model.model."): [
                module.r["default"],
                module.lora_alpha["default"],
            ]
            for path, module in adapted.named_modules()
            if isinstance(module, LoraLayer)
        }
    finally:
        adapted.unload()


def assert_equal_choice(
    model: LlamaForCausalLM, configs: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    replies = ours(configs)
    for fields, reply in zip(configs, replies, strict=True):
        expected = pefts(model, fields)
        if "error" in reply:
            assert not expected, f"{fields}: {reply}"
        else:
            assert reply == expected, fields
    return replies


def test_target_modules(model: LlamaForCausalLM) -> None:
    replies = assert_equal_choice(model, [{"target_modules": t} for t in TARGETS])
    assert sum("error" in reply for reply in replies) == 10


def test_excluded_modules(model: LlamaForCausalLM) -> None:
    excluded = (r".*\.(1|3)\..*", ".*v_proj", "v_proj", r"(?i).*GATE.*", ["v_proj"], "")
    configs = [
        {"target_modules": targets, "exclude_modules": exclude}
        for targets in (".*_proj", "all-linear", ["v_proj", "q_proj"])
        for exclude in excluded
    ]
    # Modules that peft cannot adapt cause no error if they are excluded.
    no_layers = r"model(\.(layers|norm|rotary_emb))?|.*(\d|attn|mlp|act_fn|layernorm)"
    configs.append({"target_modules": ".*", "exclude_modules": no_layers})
    replies = assert_equal_choice(model, configs)
    assert not any("error" in reply for reply in replies)


@pytest.mark.parametrize("field", ("rank_pattern", "alpha_pattern"))
def test_patterns(model: LlamaForCausalLM, field: str) -> None:
    every = r".*_proj|lm_head|.*embed_tokens"
    configs = [{"target_modules": every, field: pattern} for pattern in PATTERNS]
    replies = assert_equal_choice(model, configs)
    assert not any("error" in reply for reply in replies)


def test_layers_to_transform(model: LlamaForCausalLM) -> None:
    configs: list[dict[str, Any]] = [
        {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": layers}
        for layers in (3, [0, 11], [])
    ]
    configs.append({**configs[0], "rank_pattern": {r".*\.[3-5]\..*": 2}})
    replies = assert_equal_choice(model, configs)
    assert not any("error" in reply for reply in replies)
    # peft accepts layers_to_transform only if target_modules is a list.
    (reply,) = ours([{"target_modules": ".*q_proj", "layers_to_transform": [1]}])
    assert "layers_to_transform is [1]" in reply["error"]


# Random expressions consist of pieces of paths and of syntax that has a meaning in
# Python's re or in RE2.
PIECES = (
    *("q_proj", "model", "layers", "self_attn", "mlp", "lm_head", "_proj", "1", "k"),
    *(r"\.", r"\d", r"\w", r"\W", r"\D", r"\b", r"\B", r"\A", r"\Z", r"\z", r"\s"),
    *(r"\1", r"\60", r"\x71", r"\_", r"\-", r"\{", r"\Q", r"\pL", r"\C", r"\q", "\\"),
    *(".", ".*", ".+", ".*?", "*", "+", "?", "|", "(", ")", "(?:", "(?i)", "(?i:"),
    *("(?s)", "(?m:", "(?U)", "(?-i)", "(?-i:", "(?=", "(?!", "(?<=", "(?P<n>", "(?#"),
    *("(?P<1>", "(?P=n)", "(?x)", "(?a)", "(?>", "^", "$", "[", "]", "[^", "[]", "[^]"),
    *("[qk]", "[[:alpha:]]", "[a-z]", "[z-a]", "[^.]", r"[\w-a]", r"[a-\d]", "[a--]"),
    *("[+--]", r"[\d.]", "[[]", "[a&&b]", "-", "&", "~", "#", " ", "Q_PROJ", "é"),
    *("{", "}", "{,3}", "{2}", "{1,}", "{01}", "{0,1}", "{1,2}?", "{,}", "{2,1}"),
    *("\u017f", "++"),
)
NAMES = tuple(
    f"model.layers.{layer}.{module}"
    for layer in (0, 1, 11)
    for module in (
        *(f"self_attn.{p}_proj" for p in "qkvo"),
        *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
    )
) + ("lm_head", "model.embed_tokens")


def random_expressions(count: int) -> Iterator[str]:
    draw = random.Random(16)
    for _ in range(count):
        # Most expressions have a part that matches names, so they select some names.
        pieces = [draw.choice(PIECES) for _ in range(draw.randint(1, 5))]
        base = draw.choice((".*_proj", r".*\.q_proj", "lm_head", NAMES[0], ""))
        at = draw.randint(0, len(base))
        yield base[:at] + "".join(pieces) + draw.choice((base[at:], "", "|.*v_proj"))


def chosen(expression: str, field: str) -> list[str] | None:
    """Returns the names that peft's own functions select, or None if Python
    refuses."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if field == "target_modules":
                config = LoraConfig(target_modules=expression)
                return [n for n in NAMES if check_target_module_exists(config, n)]
            pattern = {expression: 3}
            return [n for n in NAMES if get_pattern_key(list(pattern), n) in pattern]
    except (re.error, OverflowError):
        return None


@pytest.mark.parametrize("field", ("target_modules", "rank_pattern"))
def test_random_expressions_mean_what_python_says(field: str) -> None:
    """Every accepted expression selects as in Python, and every refusal has a
    reason."""
    expressions = [e for e in random_expressions(12000) if "all-linear" not in e]
    if field == "target_modules":
        configs: list[dict[str, Any]] = [{field: e} for e in expressions]
    else:
        every = [*(f"{p}_proj" for p in "qkvo"), "mlp.gate_proj", "mlp.up_proj"]
        every += ["down_proj", "lm_head", "embed_tokens"]
        configs = [{"target_modules": every, field: {e: 3}} for e in expressions]
    same = different = 0
    for expression, reply in zip(expressions, ours(configs), strict=True):
        expected = chosen(expression, field)
        if "error" in reply:
            assert field in reply["error"]
            # Python compiles the expression and peft could use it, but RE2
            # does not support it.
            different += bool(expected)
            continue
        assert expected is not None, f"{expression!r}: Python refuses it"
        picked = {
            path
            for path, (rank, _) in reply.items()
            if path in NAMES and (field == "target_modules" or rank == 3)
        }
        assert picked == set(expected), repr(expression)
        same += 1
    assert same > 700
    assert different < same


@pytest.mark.parametrize(
    ("fields", "reason"),
    (
        ({"target_modules": "(?!.*mlp).*_proj"}, "invalid perl operator: (?!"),
        ({"target_modules": r".*(q)_\1"}, r"invalid escape sequence: \1"),
        ({"target_modules": "(q_proj"}, "missing )"),
        ({"target_modules": "(.{99}){99}"}, "invalid repetition size: {99}"),
        ({"target_modules": ".*_proj|" + "x{1000}" * 9}, "at most 8192 instructions"),
        ({"target_modules": ".*_proj", "exclude_modules": "["}, "missing ]"),
        ({"target_modules": ".*_proj", "alpha_pattern": {"[": 4}}, "missing ]"),
        ({"target_modules": ".*_proj", "rank_pattern": {"a{,3}": 4}}, "{n,m}"),
        ({"target_modules": ".*no_such"}, "what names a module to adapt"),
        ({"target_modules": ".*"}, "model, which matches too, is not one of them"),
    ),
)
def test_refusals_name_field_value_and_reason(
    fields: dict[str, Any], reason: str
) -> None:
    (error,) = (reply["error"] for reply in ours([fields]))
    assert reason in error
    field, value = list(fields.items())[-1]
    assert error.startswith(f"adapter_config.json: {field}")
    shown = next(iter(value)) if isinstance(value, dict) else value
    assert json.dumps(shown)[:80] in error
