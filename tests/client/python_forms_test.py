"""Tests data in the forms of other programs: calls of tools, templates for tools, files
that are no JSONL, and records that would teach nothing or the wrong thing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from python_data_test import TEMPLATE, USER, folder_with, tokenizer_with

import weft
from weft import data
from weft.data import ModelTokenizer
from weft.data.forms import with_parsed_calls

TOOL = {"type": "function", "function": {"name": "one"}}
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }} {% endfor %}"
SHOWS = TEMPLATE.replace("{{ m.role", CALLS + "{{ m.role")


def call(arguments: object) -> dict[str, Any]:
    function = {"name": "one", "arguments": arguments}
    return {"id": "1", "type": "function", "function": function}


@pytest.mark.parametrize(
    ("text", "parsed"),
    [('{"city": "two"}', {"city": "two"}), ("", {}), ({"city": "two"}, None)],
)
def test_arguments_in_a_text_are_parsed(text: object, parsed: object) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call(text)]}
    (found,) = with_parsed_calls([message])
    assert found["tool_calls"] == [call(text if parsed is None else parsed)]
    assert message["tool_calls"] == [call(text)]


@pytest.mark.parametrize("text", ["[1]", "{", "two", "1", "[" * 9000])
def test_arguments_that_are_no_object_are_named(text: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, SHOWS)
    answer = {"role": "assistant", "content": "three", "tool_calls": [call(text)]}
    where = r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is a text"
    for use in (tokenizer.chat, tokenizer.chat_prompt):
        with pytest.raises(weft.InvalidArgument, match=where):
            use([USER, answer])


def test_a_call_is_learnt_as_the_template_writes_its_object(tmp_path: Path) -> None:
    encode = data.Encoder(tokenizer_with(tmp_path, SHOWS), eos=False)
    calls: list[list[Any]] = [[call('{"city": "six"}')], [call({"city": "six"})], []]
    answer = {"role": "assistant", "content": "three"}
    examples = [
        encode({"messages": [USER, {**answer, "tool_calls": one}]}) for one in calls
    ]
    assert examples[0] == examples[1] != examples[2]


def test_what_a_template_does_not_show_is_named(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, TEMPLATE)
    answer = {"role": "assistant", "content": "three", "tool_calls": [call("{}")]}
    with pytest.raises(weft.InvalidArgument, match=r"messages\[1\] has tool_calls"):
        tokenizer.chat([USER, answer])
    plain = {"role": "assistant", "content": "three"}
    with pytest.raises(weft.InvalidArgument, match="shows no tools"):
        tokenizer.chat([USER, plain], tools=[TOOL])
    assert tokenizer.chat([USER, plain], tools=[]) == tokenizer.chat([USER, plain])


@pytest.mark.parametrize("in_files", [False, True])
def test_a_chat_with_tools_has_the_template_for_tools(
    in_files: bool, tmp_path: Path
) -> None:
    folder = folder_with(tmp_path, TEMPLATE)
    with_tools = "{{ tools[0].function.name }} " + TEMPLATE
    if in_files:
        (folder / "additional_chat_templates").mkdir()
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        more = folder / "additional_chat_templates" / "tool_use.jinja"
        more.write_text(with_tools)
    else:
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text("utf-8"))
        config["chat_template"] += [{"name": "tool_use", "template": with_tools}]
        path.write_text(json.dumps(config))
    tokenizer = ModelTokenizer.from_folder(folder)
    plain = tokenizer.chat_prompt([USER])
    assert tokenizer.chat_prompt([USER], tools=[TOOL]) == [
        *tokenizer.encode("one", special=False),
        *plain,
    ]


def test_records_that_teach_nothing_are_named(tmp_path: Path) -> None:
    encode = data.Encoder(tokenizer_with(tmp_path, TEMPLATE))
    record = {"prompt": "one", "completion": "two"}
    with pytest.raises(weft.InvalidArgument, match='"label" is false'):
        encode({**record, "label": False})
    assert encode({**record, "label": True}) == encode(record)
    pair = {"prompt": "one", "chosen": "two three", "rejected": "two four"}
    encode(pair)
    with pytest.raises(weft.InvalidArgument, match='"chosen" and "rejected" are equal'):
        encode({**pair, "rejected": "two three"})
    short = data.Encoder(tokenizer_with(tmp_path, TEMPLATE), max_tokens=2)
    with pytest.raises(weft.InvalidArgument, match='"chosen" and "rejected" are equal'):
        short(pair)


@pytest.mark.parametrize("text", [json.dumps([{"text": "one"}] * 2), '{"text": "one"}'])
def test_a_json_file_is_a_list_or_lines(text: str, tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text(text + "\n" + text if text[0] == "{" else text)
    assert [one.record for one in data.read(path)] == [{"text": "one"}] * 2


@pytest.mark.parametrize("name", ["some.csv", "some.jsonl.gz", ""])
def test_other_files_are_named_with_the_forms_that_are_read(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if name:
        path.write_text("prompt,completion\n")
    with pytest.raises(weft.InvalidArgument, match=r"read are \.jsonl, \.json"):
        list(data.read(path))


@pytest.mark.parametrize("stop", ["", ["one", ""], b""])
def test_an_empty_stop_is_refused(stop: Any) -> None:
    from weft.convert import sample_request

    with pytest.raises(weft.InvalidArgument, match="stop has an empty text"):
        sample_request([1], {"stop": stop})
    assert not sample_request([1], {"stop": []}).config.stop.byte_strings
