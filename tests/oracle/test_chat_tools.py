"""Compares chats with tools in OpenAI's form with transformers' apply_chat_template of
the same chats, in which the arguments of calls are objects."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import SMOLLM2, model_folder

# How models write calls, in short: Qwen 2.5 and Hermes, Qwen3-Coder, Llama 3, Mistral,
# and GLM.
CALLS = {
    "json": """<tool_call>
{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}
</tool_call>""",
    "parameters": """<function={{ f.name }}>
{%- for name, value in f.arguments | items %}
<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{%- endfor %}
</function>""",
    "alone": '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
    "list": '[TOOL_CALLS] [{{ {"name": f.name, "arguments": f.arguments} | tojson }}]',
    "keys": """<call>{{ f.name }}
{%- for name in f.arguments %}
<key>{{ name }}</key><value>{{ f.arguments[name] | tojson(ensure_ascii=False) }}</value>
{%- endfor %}</call>""",
}
TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|im_start|>assistant
{% generation %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}{% set f = call.function %}
CALL
{%- endfor %}<|im_end|>{% endgeneration %}
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ARGUMENTS: list[list[dict[str, Any]]] = [
    [{"city": "Rome"}],
    [{"city": "Zürich", "days": 3}],
    [{}],
    [{"query": 'say "hi"\n<b>', "limit": 2.5}],
    [{"nested": {"list": [1, None, True], "text": "a\\b"}}],
    [{"city": "Rome"}, {"city": "Oslo"}],
    [{"text": '{"not": "parsed"}'}],
    [{"ids": [1, 2, 3]}, {}, {"flag": False}],
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def conversation(arguments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a chat with calls, their results and an answer, in OpenAI's form."""
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "weather", "arguments": json.dumps(one)},
        }
        for number, one in enumerate(arguments)
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": '{"sky": "clear"}'}
        for call in calls
    ]
    return [
        {"role": "user", "content": "What is the weather?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *results,
        {"role": "assistant", "content": "It is clear."},
        {"role": "user", "content": "Thanks!"},
        {"role": "assistant", "content": "Gladly."},
    ]


def parsed(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    chat = copy.deepcopy(chat)
    for message in chat:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            function["arguments"] = json.loads(function["arguments"])
    return chat


@pytest.fixture(scope="module", params=list(CALLS))
def both(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns transformers' tokenizer and ours, of one template."""
    from transformers import AutoTokenizer

    from weft.data import ModelTokenizer

    folder: Path = tmp_path_factory.mktemp(request.param)
    theirs = AutoTokenizer.from_pretrained(model_folder(SMOLLM2))
    theirs.chat_template = TEMPLATE.replace("CALL", CALLS[request.param])
    theirs.save_pretrained(folder)
    return theirs, ModelTokenizer.from_folder(folder)


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=json.dumps)
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "none"])
def test_calls_are_those_of_transformers(
    arguments: list[dict[str, Any]], tools: Any, both: Any
) -> None:
    from weft.data import Encoder

    theirs, ours = both
    chat = conversation(arguments)
    out = theirs.apply_chat_template(
        parsed(chat), tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    mask = [bool(one) for one in out["assistant_masks"]]
    assert ours.chat(chat, tools=tools) == (out["input_ids"], mask)
    assert ours.chat(parsed(chat), tools=tools) == (out["input_ids"], mask)
    prompt = theirs.apply_chat_template(
        parsed(chat)[:-1], tools=tools, add_generation_prompt=True, return_dict=False
    )
    assert ours.chat_prompt(chat[:-1], tools=tools) == prompt
    example = Encoder(ours).example({"messages": chat, "tools": tools})
    end = len(example.tokens)
    assert example.tokens == out["input_ids"][:end]
    assert example.learnt == mask[:end]
    assert not any(mask[end:])
