"""Tests weft.data: formats, ends of sequence, truncation, sources, and what happens to
bad records."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Logs, Patch, save_tokenizer
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

import weft
from weft import data
from weft.data import ModelTokenizer

WORDS = "end user assistant one two three four five six seven".split()
EOS = 0
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ' ' + m.content }}"
    "{% if m.role == 'assistant' %}{{ ' end' }}{% endif %}{{ ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
# This template renders the last turn differently.
UNSTABLE = TEMPLATE.replace("m.content", "(m.content if loop.last else 'seven')")
USER = {"role": "user", "content": "one two"}
ANSWER = {"role": "assistant", "content": "three"}
OTHER = {"role": "assistant", "content": "four five"}


def folder_with(tmp_path: Path, template: str | None) -> Path:
    config: dict[str, Any] = {"eos_token": {"content": "end"}}
    if template is not None:
        config["chat_template"] = [{"name": "default", "template": template}]
    save_tokenizer(tmp_path, WORDS, "end", config)
    generation = {"eos_token_id": [EOS, 9]}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


def tokenizer_with(tmp_path: Path, template: str | None) -> ModelTokenizer:
    return ModelTokenizer.from_folder(folder_with(tmp_path, template))


@pytest.fixture
def tokenizer(tmp_path: Path) -> ModelTokenizer:
    return tokenizer_with(tmp_path, TEMPLATE)


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def learnt(example: data.Example | data.Pair) -> str:
    """Returns the words. Words that are learnt are in capitals."""
    assert isinstance(example, data.Example)
    pairs = zip(example.tokens, example.learnt, strict=True)
    return " ".join(WORDS[t].upper() if one else WORDS[t] for t, one in pairs)


SHARE_GPT = [
    {"from": "system", "value": "seven"},
    {"from": "human", "value": "one two"},
    {"from": "gpt", "value": "three"},
]
UNLEARNT = {**SHARE_GPT[2], "weight": 0}
# Content in parts, as the OpenAI front takes it.
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


# What is learnt of USER and ANSWER, and of USER and OTHER.
TURN = "user one two assistant THREE END"
OTHER_TURN = "user one two assistant FOUR FIVE END"


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"text": "one two"}, "ONE TWO END"),
        ({"text": "one two end"}, "ONE TWO END"),
        ({"prompt": "one two", "completion": "three"}, "one two THREE END"),
        ({"messages": [USER, ANSWER, USER, OTHER]}, f"{TURN} {OTHER_TURN}"),
        ({"prompt": [USER], "completion": [ANSWER]}, TURN),
        ({"messages": [USER, ANSWER, USER]}, TURN),
        ({"tokens": ids("one two three"), "prompt_length": 1}, "one TWO THREE"),
        ({"messages": [{"role": "user", "content": PARTS}, ANSWER]}, TURN),
        ({"conversations": SHARE_GPT}, f"end seven {TURN}"),
        ({"conversations": SHARE_GPT[1:], "system": "six"}, f"end six {TURN}"),
        ({"conversations": [USER, ANSWER]}, TURN),
        (
            {"conversations": [SHARE_GPT[1], UNLEARNT] * 2 + SHARE_GPT[1:]},
            f"{TURN.lower()} {TURN.lower()} {TURN}",
        ),
        (
            {"instruction": "one", "input": "", "output": "three"},
            "user one assistant THREE END",
        ),
        (
            {"instruction": "one", "input": "two", "output": "three", "history": []},
            TURN,
        ),
        (
            {"system": "six", "instruction": "one", "output": "three"},
            "end six user one assistant THREE END",
        ),
    ],
)
def test_formats_learn_what_they_should_and_end(
    tokenizer: ModelTokenizer, record: dict[str, Any], expected: str
) -> None:
    assert learnt(data.Encoder(tokenizer)(record)) == expected


def test_a_message_of_weight_0_is_not_learnt(tmp_path: Path) -> None:
    off, on = {**ANSWER, "weight": 0}, {**OTHER, "weight": 1}
    marked = TEMPLATE.replace(
        "{% if m.role == 'assistant' %}{{ ' end' }}{% endif %}", ""
    ).replace(
        "{{ m.role + ' ' + m.content }}",
        "{{ m.role + ' ' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content + ' end' }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}",
    )
    for template in (TEMPLATE, marked):
        tokenizer = tokenizer_with(tmp_path, template)
        encode = data.Encoder(tokenizer)
        mixed = encode({"messages": [USER, off, USER, on]})
        assert learnt(mixed) == f"{TURN.lower()} {OTHER_TURN}"
        first = [USER, {**ANSWER, "weight": 1}, USER, {**OTHER, "weight": 0}]
        assert learnt(encode({"messages": first})) == TURN
        with pytest.raises(weft.InvalidArgument, match="nothing to learn"):
            encode({"messages": [USER, off]})
        last = data.Encoder(tokenizer, loss_on="last")
        with pytest.raises(weft.InvalidArgument, match="nothing to learn"):
            last({"messages": [USER, ANSWER, USER, off]})


def test_a_prompt_holds_no_answer(tokenizer: ModelTokenizer) -> None:
    encoder = data.Encoder(tokenizer, eos=False)
    assert encoder.prompt({"messages": [USER]}) == ids("user one two assistant")
    for name in ("messages", "prompt"):
        with pytest.raises(weft.InvalidArgument, match="ends with the assistant"):
            encoder.prompt({name: [USER, ANSWER]})


@pytest.mark.parametrize("first", ["one", "end"])
def test_an_end_that_the_tokenizer_appends_is_left_out(
    tmp_path: Path, first: str
) -> None:
    folder = folder_with(tmp_path, TEMPLATE)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A end", special_tokens=[("end", 0), ("one", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    both = ModelTokenizer.from_folder(folder)
    assert both.encode("two three") == ids(f"{first} two three")
    assert both.encode("two end") == ids(f"{first} two end")  # It is in the text.
    assert both.encode("") == ids(first)
    encode = data.Encoder(both)
    record = {"prompt": "two", "completion": "three"}
    assert learnt(encode(record)) == f"{first} two THREE END"
    assert learnt(encode({"prompt": "", "completion": "three"})) == f"{first} THREE END"
    assert encode.prompt({"prompt": "two"}) == ids(f"{first} two")


def expect_end(folder: Path, number: int) -> None:
    """Expects that <|im_end|> is this token, and ends a sequence."""
    tokenizer = ModelTokenizer.from_folder(folder)
    assert tokenizer.encode("one<|im_end|>two") == [*ids("one"), number, *ids("two")]
    assert tokenizer.eos_ids[0] == number


def test_tokens_of_the_config_are_added_where_they_belong(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, TEMPLATE)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    number = len(WORDS)
    added = {"content": "<|im_end|>", "special": True}
    decoder = {str(number): added, "0": {"content": "end", "special": True}}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            config | {"added_tokens_decoder": decoder, "eos_token": "<|im_end|>"}
        )
    )
    expect_end(folder, number)


def test_tokens_of_the_files_of_older_folders_are_added_where_they_belong(
    tmp_path: Path,
) -> None:
    folder = folder_with(tmp_path, TEMPLATE)
    number = len(WORDS)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE})
    )
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_end|>": number}))
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}})
    )
    expect_end(folder, number)
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_end|>": number + 3}))
    with pytest.raises(weft.InvalidArgument, match=rf"\({number + 3}\) is not in"):
        ModelTokenizer.from_folder(folder)
    (folder / "added_tokens.json").unlink()
    with pytest.raises(weft.InvalidArgument, match=r"eos_token '<.im_end.>' is not"):
        ModelTokenizer.from_folder(folder)


def test_a_folder_with_an_older_tokenizer_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(weft.InvalidArgument, match=r"no tokenizer\.json in [^,]*$"):
        ModelTokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(
        weft.InvalidArgument, match=r"only tokenizer\.model; .*save_pretrained\("
    ):
        ModelTokenizer.from_folder(tmp_path)


def test_a_turn_that_lacks_the_end_of_its_prompt_is_learnt_behind_what_both_have(
    tmp_path: Path,
) -> None:
    """Templates such as R1's open the model's thoughts in the prompt, and leave them
    out of a turn that ended."""
    thinking = TEMPLATE.replace("assistant {% endif %}", "assistant seven {% endif %}")
    tokenizer = tokenizer_with(tmp_path, thinking)
    record = {"messages": [USER, ANSWER, USER, OTHER]}
    assert learnt(data.Encoder(tokenizer)(record)) == f"{TURN} {OTHER_TURN}"
    last = data.Encoder(tokenizer, loss_on="last")
    assert learnt(last(record)) == f"{TURN.lower()} {OTHER_TURN}"


def test_a_template_that_renders_a_prompt_otherwise_is_refused_and_another_helps(
    tmp_path: Path,
) -> None:
    early = "{% if add_generation_prompt %}seven {% endif %}" + TEMPLATE
    folder = folder_with(tmp_path, early)
    record = {"messages": [USER, ANSWER]}
    encode = data.Encoder(ModelTokenizer.from_folder(folder))
    with pytest.raises(weft.InvalidArgument, match=r"before this turn"):
        encode(record)
    other = tmp_path / "other.jinja"
    other.write_text(TEMPLATE)
    tokenizer = ModelTokenizer.from_folder(folder, chat_template=other)
    assert learnt(data.Encoder(tokenizer)(record)) == TURN
    with pytest.raises(weft.InvalidArgument, match=r"chat template .*no-such"):
        ModelTokenizer.from_folder(folder, chat_template=tmp_path / "no-such")


def test_what_is_no_switch_of_a_template_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "{{ eos_token }}{{ thinking }}")

    def read(**kwargs: object) -> None:
        ModelTokenizer.from_folder(folder, chat_template_kwargs=kwargs)

    with pytest.raises(
        weft.InvalidArgument, match=r"'thinkin'; its switches: thinking"
    ):
        read(thinkin=False)
    with pytest.raises(weft.InvalidArgument, match=r"'eos_token' has its value .*: th"):
        read(eos_token="seven")
    folder_with(tmp_path, None)
    with pytest.raises(weft.InvalidArgument, match="no chat template that reads"):
        read(thinking=False)


def test_prompts_of_other_programs_hold_no_answer(tokenizer: ModelTokenizer) -> None:
    prompt = data.Encoder(tokenizer).prompt
    expected = ids("user one two assistant")
    alpaca = {"instruction": "one", "input": "two", "output": "three"}
    assert prompt(alpaca) == prompt({"conversations": SHARE_GPT[1:2]}) == expected
    assert prompt({**alpaca, "text": "seven"}) == expected
    assert prompt({"instruction": "one", "prompt": "seven"}) == ids("seven")
    with pytest.raises(weft.InvalidArgument, match='"conversations" ends with the as'):
        prompt({"conversations": SHARE_GPT[1:3]})
    with pytest.raises(weft.InvalidArgument, match="ends with the assistant"):
        prompt({"conversations": SHARE_GPT})


def test_an_answer_gets_no_space_before_it_that_nobody_wrote() -> None:
    letters = [*"\u2581ab=", "<eos>", "=b"]
    sentence_piece = Tokenizer(
        models.BPE({c: i for i, c in enumerate(letters)}, [("=", "b")])
    )
    sentence_piece.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer = ModelTokenizer(sentence_piece, [4])
    encode = data.Encoder(tokenizer)
    example = encode.example({"prompt": "ab=", "completion": "a"})
    assert [letters[t] for t in example.tokens] == [*"\u2581ab=a", "<eos>"]
    assert example.prompt_length == 4
    # Encoded together, "=" and "b" would become the token "=b". But sampling continues
    # the prompt's own tokens, so the answer is encoded alone.
    example = encode.example({"prompt": "a=", "completion": "b"})
    assert [letters[t] for t in example.tokens] == [*"\u2581a=\u2581b", "<eos>"]


def test_the_last_turn_alone_can_be_learnt(tokenizer: ModelTokenizer) -> None:
    encode = data.Encoder(tokenizer, loss_on="last")
    example = encode.example({"messages": [USER, ANSWER, USER, OTHER]})
    assert learnt(example).endswith("three end user one two assistant FOUR FIVE END")
    with pytest.raises(weft.InvalidArgument, match="last message"):
        encode({"messages": [USER, ANSWER, USER]})


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "one", "chosen": "two", "rejected": "three"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
    ],
)
def test_preferences_are_two_answers_to_one_prompt(
    tokenizer: ModelTokenizer, record: dict[str, Any]
) -> None:
    pair = data.Encoder(tokenizer)(record)
    assert isinstance(pair, data.Pair)
    length = pair.chosen.prompt_length
    assert pair.chosen.tokens[:length] == pair.rejected.tokens[:length]
    assert length > 0 and pair.chosen.tokens != pair.rejected.tokens
    assert pair.chosen.tokens[-1] == pair.rejected.tokens[-1] == EOS


def test_ends_can_be_left_out_and_are_asked_for_where_there_are_none(
    tokenizer: ModelTokenizer,
) -> None:
    encode = data.Encoder(tokenizer, eos=False)
    assert learnt(encode({"text": "one two"})) == "ONE TWO"
    nameless = ModelTokenizer(Tokenizer(models.WordLevel({"one": 0}, "one")))
    with pytest.raises(weft.InvalidArgument, match="end of sequence"):
        data.Encoder(nameless)
    data.Encoder(nameless, eos=False)


def test_truncation_follows_its_rule(tokenizer: ModelTokenizer) -> None:
    record = {"prompt": "one two", "completion": "three four"}

    def cut(rule: data.encode.Truncate, most: int = 3) -> str:
        encode = data.Encoder(tokenizer, max_tokens=most, truncate=rule)
        return learnt(encode(record))

    assert cut("end") == "one two THREE"  # The end of sequence is cut off too.
    assert cut("start") == "THREE FOUR END"
    with pytest.raises(weft.InvalidArgument, match="5 tokens > max_tokens 3"):
        cut("never")
    with pytest.raises(weft.InvalidArgument, match="nothing to learn"):
        cut("end", most=2)


def test_an_example_becomes_a_datum_of_shifted_tokens() -> None:
    example = data.Example([5, 6, 7], [True, False, True])
    assert example.num_learnt == 1  # Nothing predicts the first word.
    datum = example.datum(0.5)
    assert datum.tokens.tolist() == [5, 6] and datum.targets.tolist() == [6, 7]
    assert datum.weights is not None and datum.weights.tolist() == [0, 0.5]
    with pytest.raises(weft.InvalidArgument, match="several stretches"):
        _ = data.Example([5, 6, 7], [True, False, True]).prompt_length


def test_what_a_template_or_no_model_takes_is_refused(
    tokenizer: ModelTokenizer,
) -> None:
    encode = data.Encoder(tokenizer)
    with pytest.raises(weft.InvalidArgument, match="chat template"):
        encode({"messages": [{"role": "user", "content": 3}, ANSWER]})
    with pytest.raises(weft.InvalidArgument, match="token id"):
        encode({"tokens": [1, 2**32]})
    with pytest.raises(weft.InvalidArgument, match='"rejected"'):
        encode({"prompt": "one", "chosen": "two"})


def test_a_template_that_changes_turns_teaches_the_last_alone(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, UNSTABLE)
    record = {"messages": [USER, ANSWER, USER, OTHER]}
    with pytest.raises(weft.InvalidArgument, match=r"messages\[1\]"):
        data.Encoder(tokenizer)(record)


def test_whatever_a_template_raises_is_about_its_record(tmp_path: Path) -> None:
    for template in ("{{ messages[0].content.index('z') }}", "{{ 1 // 0 }}"):
        tokenizer = tokenizer_with(tmp_path, template)
        with pytest.raises(weft.InvalidArgument, match="chat template"):
            tokenizer.chat_prompt([USER])


def test_a_template_writes_json_as_transformers_lets_it() -> None:
    source = "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}"
    chat = [{"role": "user", "content": "<\u00e9>"}]
    written = data.ChatTemplate(source, {}).render(chat)
    assert written == '[{"content":"<\u00e9>","role":"user"}]'


def test_a_template_renders_on_several_threads() -> None:
    class Slow:
        """A text that lets other threads run while a template writes the text."""

        def __init__(self, text: str) -> None:
            self._text = text

        def __str__(self) -> str:
            time.sleep(1e-5)
            return self._text

    template = data.ChatTemplate("{% for m in messages %}{{ m }}{% endfor %}", {})
    chats: list[Any] = [[Slow(str(n))] * 9 for n in range(20)]
    with ThreadPoolExecutor(4) as threads:
        written = list(threads.map(template.render, chats))
    assert written == [str(n) * 9 for n in range(20)]


# In this template, a turn ends with a line break, without an end of sequence.
PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize(
    "answer", ["ok", "ok \U0001f9d1", "\u00e9", "  two", "a\u0301"]
)
def test_a_turn_is_learnt_to_the_last_byte_of_its_last_character(
    answer: str, trim: bool
) -> None:
    bytes_alone = Tokenizer(
        models.BPE(
            {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
            [],
        )
    )
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.pre_tokenizer = level
    bytes_alone.post_processor = processors.ByteLevel(trim_offsets=trim)
    bytes_alone.decoder = decoders.ByteLevel()
    template = data.ChatTemplate(PLAIN, {})
    tokenizer = ModelTokenizer(bytes_alone, (), template)
    example = data.Encoder(tokenizer, eos=False).example(
        {"messages": [USER, {"role": "assistant", "content": answer}]}
    )
    pairs = zip(example.tokens, example.learnt, strict=True)
    written = tokenizer.decode([token for token, one in pairs if one])
    # With trim_offsets, no token's offsets cover leading spaces. These are not learnt.
    assert written == (answer.lstrip() if trim else answer)


def test_a_tokenizer_that_pads_or_cuts_is_told_not_to(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, TEMPLATE)
    path = folder / "tokenizer.json"
    file = Tokenizer.from_file(str(path))
    file.enable_padding(length=8)
    file.enable_truncation(2)
    file.save(str(path))
    tokenizer = ModelTokenizer.from_folder(folder)
    assert tokenizer.encode("one two three") == ids("one two three")
    path.write_text("{")
    with pytest.raises(weft.InvalidArgument, match="cannot be read"):
        ModelTokenizer.from_folder(folder)


def test_a_folder_without_template_has_no_chats(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, None)
    with pytest.raises(weft.InvalidArgument, match="no chat template"):
        data.Encoder(tokenizer)({"messages": [USER, ANSWER]})
    unnamed = {"eos_token": "end", "chat_template": ["one", {"template": TEMPLATE}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(unnamed))
    with pytest.raises(weft.InvalidArgument, match="no chat template"):
        ModelTokenizer.from_folder(tmp_path).chat_prompt([USER])
    with pytest.raises(weft.InvalidArgument, match="chat template: "):
        tokenizer_with(tmp_path, "{% if %}")


def test_lines_are_streamed_and_bad_ones_reported_and_counted(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "data.jsonl"
    lines = [b'{"text": "one"}', b"", b"{", b"[1]", b"\xff", b'{"text": ""}']
    deep = b"[" * 100_000
    path.write_bytes(b"\n".join([*lines, b'{"text": "two"}', deep]))
    bad: list[data.BadRecord] = []
    encode = data.Encoder(tokenizer, eos=False)
    dataset = data.Dataset(path, encode.example, on_bad=bad.append)
    # A text of one token has nothing that predicts the token.
    assert list(dataset) == [] and dataset.num_bad == 7
    places = [f"{path}:{n}" for n in (1, 3, 4, 5, 6, 7, 8)]
    assert [one.where for one in bad] == places
    assert "not JSON" in bad[1].reason and "not an object" in bad[2].reason
    with_end = data.Dataset(path, data.Encoder(tokenizer), on_bad=bad.append)
    assert len(with_end.load()) == 2
    assert (with_end.num_good, with_end.num_bad) == (2, 5)
    # The records are read one at a time.
    assert next(iter(with_end)) and with_end.num_good == 1


def test_bad_records_are_logged_unless_told_otherwise(caplog: Logs) -> None:
    def refuse(record: data.Record) -> int:
        raise weft.InvalidArgument("too odd")

    with pytest.raises(weft.InvalidArgument, match="no usable record, 1 bad"):
        data.Dataset([{"text": "one"}], refuse).load()
    assert "left out: record 1: too odd" in caplog.text


def test_parquet_is_read_in_batches(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data.parquet"
    # The table holds null where a record lacks a column, or a message lacks a field.
    calling = {**USER, "tool_calls": [{"name": "f"}]}
    rows = [
        {"messages": [USER, ANSWER]},
        {"messages": None, "text": "one two"},
        {"messages": [calling]},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    found = list(data.read(path))
    assert [one.where for one in found] == [f"{path}:{n}" for n in (1, 2, 3)]
    assert [one.record for one in found][::2] == rows[::2]
    made = data.Dataset(path, data.Encoder(tokenizer)).load()
    assert learnt(made[0]) == TURN


def test_a_parquet_file_that_is_none_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "data.parquet"
    path.write_bytes(b"not a table")
    with pytest.raises(weft.InvalidArgument, match=re.escape(str(path))):
        list(data.read(path))


def test_hugging_face_datasets_are_streamed(monkeypatch: Patch) -> None:
    asked: list[Any] = []

    def load_dataset(*args: Any, **options: Any) -> list[dict[str, str]]:
        asked.append((args, options))
        return [{"text": "one"}]

    fake = SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    found = list(data.read("hf:owner/name:test"))
    assert found == [data.Located("hf:owner/name:test:1", {"text": "one"})]
    assert asked == [(("owner/name",), {"split": "test", "streaming": True})]
    list(data.read("hf:owner/name"))
    assert asked[1][1]["split"] == "train"


def test_a_folder_of_records_is_a_dataset_of_hugging_face(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "records"
    folder.mkdir()
    lines: list[dict[str, Any]] = [{"text": "one two"}, {"messages": [USER, ANSWER]}]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = list(data.read(f"hf:{folder}"))
    assert [one.record for one in found] == lines
    # Each row of a datasets.Dataset has every column.
    rows = datasets.Dataset.from_list([{**lines[0], "messages": None}, lines[1]])
    made = data.Dataset(rows, data.Encoder(tokenizer)).load()
    assert [learnt(one) for one in made] == ["ONE TWO END", TURN]
    with pytest.raises(weft.InvalidArgument, match=r"hf:.*none"):
        data.read(f"hf:{folder}:none")
    (folder / "train.jsonl").write_text('{"text": "one"}\n{"text": ')
    with pytest.raises(weft.InvalidArgument, match=f"hf:{folder}:1: "):
        list(data.read(f"hf:{folder}"))


def test_a_stream_that_breaks_names_the_record(monkeypatch: Patch) -> None:
    def load_dataset(*_: Any, **__: Any) -> Iterator[dict[str, str]]:
        yield {"text": "one"}
        raise ConnectionError("the network is gone")

    fake = SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    found = data.read("hf:owner/name")
    assert next(found).record == {"text": "one"}
    with pytest.raises(weft.InvalidArgument, match="hf:owner/name:2: the network"):
        next(found)


@pytest.mark.parametrize(
    ("missing", "read", "advice"),
    [
        ("tokenizers", lambda p: ModelTokenizer.from_folder(p), "tokenizers"),
        ("jinja2", lambda p: ModelTokenizer.from_folder(p), "jinja2"),
        ("pyarrow", lambda p: list(data.read(p / "a.parquet")), "pyarrow"),
        ("datasets", lambda p: list(data.read("hf:x")), "datasets"),
    ],
)
def test_what_is_missing_is_named_by_a_package_that_exists(
    missing: str,
    read: Callable[[Path], object],
    advice: str,
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    folder = folder_with(tmp_path, TEMPLATE)
    (folder / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(weft.InvalidArgument, match=f"pip install {advice}$"):
        read(folder)


def test_a_source_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(weft.InvalidArgument, match="no such file"):
        data.Dataset(tmp_path / "none.jsonl", dict).load()


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "one", "completion": "two"},
        {"text": "one two"},
        {"tokens": [3, 4], "prompt_length": 1},
    ],
)
def test_an_instruction_beside_another_form_changes_nothing(
    record: dict[str, Any], tokenizer: ModelTokenizer
) -> None:
    encode = data.Encoder(tokenizer)
    alpaca = {"instruction": "six", "output": "seven"}
    assert encode({**alpaca, **record}) == encode(record)


def test_a_turn_that_lacks_only_spaces_of_its_prompt_is_learnt(tmp_path: Path) -> None:
    # The turn's tokens begin with all tokens of the prompt, which ends otherwise.
    template = (
        "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '  ' }}{% endif %}"
    )
    encode = data.Encoder(tokenizer_with(tmp_path, template))
    assert learnt(encode({"messages": [USER, ANSWER]})) == "one two THREE END"
