"""Compares the token ids and masks of chats with transformers' apply_chat_template."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
from conftest import SMOLLM2, model_folder


class Family(NamedTuple):
    """A chat template, in which `generation` blocks mark the assistant's text."""

    template: str
    eos: str
    special: list[str]
    has_system: bool = True


CHATML = """
{%- if messages[0].role != 'system' -%}
{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}
{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {{ '<|im_start|>assistant\n' }}{% generation %}{{ m.content + '<|im_end|>' }}
    {%- endgeneration %}{{ '\n' }}
  {%- else -%}
    {{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
LLAMA3 = """
{{- bos_token }}
{%- for m in messages %}
  {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}
  {%- if m['role'] == 'assistant' %}
    {%- generation %}{{ m['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
  {%- else %}{{- m['content'] | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
  {{- raise_exception('No system role') }}
{%- endif %}
{%- for m in messages %}
  {%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}
  {{- '<start_of_turn>' + role + '\n' }}
  {%- if role == 'model' %}
    {%- generation %}{{ m['content'] | trim + '<end_of_turn>' }}{% endgeneration %}
  {%- else %}{{- m['content'] | trim + '<end_of_turn>' }}{% endif %}
  {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""
MISTRAL = """{{ bos_token }}
{%- for m in messages %}
  {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('Roles must alternate') }}
  {%- endif %}
  {%- if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}
  {%- else %}{% generation %}{{ ' ' + m['content'] + eos_token }}{% endgeneration %}
  {%- endif %}
{%- endfor %}
"""
ZEPHYR = """{% for m in messages %}
{% if m['role'] == 'assistant' %}
{{ '<|assistant|>\n' }}{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}
{{ '\n' }}{% else %}
{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>\n' }}{% endif %}
{% endfor %}"""
FAMILIES = {
    "chatml": Family(CHATML, "<|im_end|>", ["<|im_start|>"]),
    "llama3": Family(
        LLAMA3, "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"]
    ),
    "gemma": Family(GEMMA, "<end_of_turn>", ["<start_of_turn>"], has_system=False),
    "mistral": Family(MISTRAL, "</s>", [], has_system=False),
    "zephyr": Family(ZEPHYR, "</s>", ["<|user|>", "<|assistant|>", "<|system|>"]),
}
CHATS = [
    [("user", "What is rain?"), ("assistant", "Water from clouds.")],
    [
        ("user", "Grüße, 世界 \U0001f30d\nsecond line"),
        ("assistant", "  spaces \u00e9\u00e9, a line\n\nand  tabs\t"),
        ("user", "<b>&amp; 'quotes'</b>"),
        ("assistant", "```python\nprint({'a': 1})\n```"),
    ],
    [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "")],
]


def chats(family: Family) -> list[list[dict[str, str]]]:
    made = [[{"role": r, "content": c} for r, c in chat] for chat in CHATS]
    if family.has_system:
        made += [[{"role": "system", "content": "Be brief."}, *chat] for chat in made]
    return made


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a family, transformers' tokenizer with the family's template, and a
    folder. Its subfolders hold the tokenizer: `marked` has `generation` blocks in the
    template, and `plain` has none."""
    from transformers import AutoTokenizer

    family = FAMILIES[request.param]
    tokenizer = AutoTokenizer.from_pretrained(model_folder(SMOLLM2))
    tokenizer.add_special_tokens(
        {"eos_token": family.eos, "additional_special_tokens": family.special}
    )
    folder = tmp_path_factory.mktemp(request.param)
    # An `if` block strips the same blanks as a `generation` block.
    plain = re.sub(r"(%-? ?)generation ", r"\1if true ", family.template)
    plain = plain.replace("endgeneration", "endif")
    assert plain != family.template
    for name, template in (("marked", family.template), ("plain", plain)):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder / name)
    tokenizer.chat_template = family.template
    return family, tokenizer, folder


def expected(tokenizer: Any, chat: Any) -> tuple[list[int], list[bool]]:
    out = tokenizer.apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True
    )
    return out["input_ids"], [bool(one) for one in out["assistant_masks"]]


def test_tokens_and_mask_are_those_of_transformers(case: Any) -> None:
    from weft.data import ModelTokenizer

    family, tokenizer, folder = case
    ours = ModelTokenizer.from_folder(folder / "marked")
    for chat in chats(family):
        tokens, mask = expected(tokenizer, chat)
        assert ours.chat(chat) == (tokens, mask)
        assert any(mask) and not all(mask)
        prompt = tokenizer.apply_chat_template(
            chat[:-1], add_generation_prompt=True, return_dict=False
        )
        assert ours.chat_prompt(chat[:-1]) == prompt
        last = ours.chat(chat, last=True)[1]
        first = next(i for i, one in enumerate(last) if one)
        assert last == [one and i >= first for i, one in enumerate(mask)]


def test_without_marks_the_mask_is_the_same(case: Any) -> None:
    from weft.data import ModelTokenizer

    family, tokenizer, folder = case
    ours = ModelTokenizer.from_folder(folder / "plain")
    for chat in chats(family):
        assert ours.chat(chat) == expected(tokenizer, chat)


def test_what_a_template_refuses_is_refused(case: Any) -> None:
    import weft
    from weft.data import ModelTokenizer

    family, _, folder = case
    if family.has_system:
        pytest.skip("this template takes every chat")
    ours = ModelTokenizer.from_folder(folder / "marked")
    chat = [{"role": "system", "content": "s"}, *chats(family)[0]]
    with pytest.raises(weft.InvalidArgument, match=r"system role|must alternate"):
        ours.chat(chat)


def test_the_demo_models_own_template() -> None:
    from transformers import AutoTokenizer

    from weft.data import ModelTokenizer

    folder = model_folder(SMOLLM2)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = ModelTokenizer.from_folder(folder)
    assert ours.eos_ids == (theirs.eos_token_id,)
    for chat in chats(FAMILIES["chatml"]):
        # A blank at the beginning would share a token with the line break before
        # it.
        for message in chat:
            message["content"] = message["content"].lstrip()
        tokens, mask = ours.chat(chat)
        assert tokens == theirs.apply_chat_template(chat, return_dict=False)
        written = [t for t, one in zip(tokens, mask, strict=True) if one]
        answers = [m["content"] for m in chat if m["role"] == "assistant"]
        assert theirs.decode(written) == "".join(a + "<|im_end|>" for a in answers)
