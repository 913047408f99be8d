"""Tests `python -m weft` with a word-level tokenizer."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Capture, Patch, save_tokenizer
from fake_weftd import FakeWeftd

import weft
from weft import peft_extras
from weft.__main__ import main

WORDS = ["zero", "one", "two", "three", "four", "five", "six"]
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    config = {"eos_token": "six", "chat_template": TEMPLATE}
    save_tokenizer(tmp_path, WORDS, "zero", config)
    return tmp_path


def test_tokenizes_texts_and_prompts(model_dir: Path, capsys: Capture) -> None:
    texts = model_dir / "texts.jsonl"
    records = [
        {"text": "one two"},
        {"prompt": "one", "completion": "two three"},
        {"tokens": [5, 6]},
    ]
    texts.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    output = model_dir / "tokens.jsonl"
    base = ["tokenize", "--model-dir", str(model_dir)]
    assert main([*base, "--input", str(texts), "--output", str(output)]) == 0
    made = [json.loads(line) for line in output.read_text().splitlines()]
    assert made == [
        {"tokens": [1, 2, 6], "prompt_length": 0},
        {"tokens": [1, 2, 3, 6], "prompt_length": 1},
        {"tokens": [5, 6], "prompt_length": 0},
    ]
    assert main([*base, "--no-eos", "--input", str(texts)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert json.loads(first) == {"tokens": [1, 2], "prompt_length": 0}


def test_tokenizes_what_a_pipe_brings(model_dir: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "weft", "tokenize", "--model-dir", str(model_dir)],
        input='{"text": "one"}\n',
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(made.stdout)["tokens"] == [1, 6]


def test_a_reader_that_ends_first_is_no_error(model_dir: Path) -> None:
    texts = model_dir / "texts.jsonl"
    command = f"{sys.executable} -m weft tokenize --model-dir {model_dir}"
    for count in (1, 10_000):  # The output waits for the end, or fills the pipe.
        texts.write_text('{"text": "one"}\n' * count)
        done = subprocess.run(
            [
                "bash",
                "-c",
                f"{command} --input {texts} | true; echo ${{PIPESTATUS[0]}}",
            ],
            capture_output=True,
            text=True,
        )
        assert (done.stdout, done.stderr) == ("141\n", "")


@pytest.mark.parametrize("line", ["{}", "[1]", "{"])
def test_bad_records_fail(model_dir: Path, line: str, capsys: Capture) -> None:
    texts = model_dir / "texts.jsonl"
    texts.write_text(line + "\n" + '{"text": "one"}\n')
    base = ["tokenize", "--model-dir", str(model_dir)]
    # The good record is written nevertheless.
    assert main([*base, "--input", str(texts)]) == 1
    printed = capsys.readouterr()
    assert f"{texts}: 1 records left out" in printed.err
    assert json.loads(printed.out)["tokens"] == [1, 6]


def test_samples_texts_and_chats(
    server: FakeWeftd, client: weft.Client, model_dir: Path, capsys: Capture
) -> None:
    client.create_adapter("a")
    sample = ["sample", "--model-dir", str(model_dir), "--server", server.target]
    sample += ["--prompt", "one", "--max-tokens", "3", "--adapter", "a"]
    for chat in ([], ["--chat"]):
        assert main([*sample, *chat]) == 0
        assert "two three four" in capsys.readouterr().out


def test_missing_files_and_servers_are_said(
    tmp_path: Path, model_dir: Path, capsys: Capture
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    arguments = ["--model-dir", str(empty), "--prompt", "one"]
    assert main(["sample", *arguments]) == 1
    assert "tokenizer.json" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["sample"])
    assert caught.value.code == 2


def test_a_chat_goes_on_until_its_input_ends(
    server: FakeWeftd,
    client: weft.Client,
    model_dir: Path,
    capsys: Capture,
    monkeypatch: Patch,
) -> None:
    client.create_adapter("a").snapshot("s")
    lines = ["/retry", "one", "/retry", "", "two", "/clear", "three", "/help"]
    lines += ["/save it", "/quit", "four"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    asked: list[list[int]] = []
    stream = weft.Adapter.sample_stream

    def noted(adapter: weft.Adapter, prompt: list[int], **options: Any) -> Any:
        asked.append(prompt)
        assert options["snapshot"] == "s"
        return stream(adapter, prompt, **options)

    monkeypatch.setattr(weft.Adapter, "sample_stream", noted)
    chat = ["chat", "--model-dir", str(model_dir), "--server", server.target]
    chat += ["--adapter", "a@s", "--max-tokens", "3", "--system", "five"]
    assert main(chat) == 0
    assert asked == [
        [5, 1],
        [5, 1],
        [5, 1, 2, 3, 4, 2],  # The first answer is a part of the second prompt.
        [5, 3],
    ]
    printed = capsys.readouterr().out
    assert "there is no answer yet" in printed
    assert printed.count("two three four") == 2
    assert printed.count("Ctrl-D ends") == 3
    assert "/save it is no command." in printed


def test_a_turn_that_fails_leaves_the_chat_as_it_was(
    server: FakeWeftd,
    client: weft.Client,
    model_dir: Path,
    capsys: Capture,
    monkeypatch: Patch,
) -> None:
    client.create_adapter("a")
    lines = ["one", "two", "three", "/retry", "/etc/hosts?", "/help"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    asked: list[tuple[list[int], int]] = []
    stream = weft.Adapter.sample_stream
    errors = [None, weft.ResourceExhausted("full"), KeyboardInterrupt(), None, None]

    def noted(adapter: weft.Adapter, prompt: list[int], **options: Any) -> Any:
        asked.append((prompt, options["seed"]))
        if error := errors[len(asked) - 1]:
            raise error
        return stream(adapter, prompt, **options)

    monkeypatch.setattr(weft.Adapter, "sample_stream", noted)
    chat = ["chat", "--model-dir", str(model_dir), "--server", server.target]
    assert main([*chat, "--adapter", "a", "--max-tokens", "1", "--seed", "7"]) == 0
    first = [1, 2]  # "one", and the answer "two".
    assert asked == [
        ([1], 7),
        ([*first, 2], 7),
        ([*first, 3], 7),
        ([1], 8),  # Another seed, so that it can be another answer.
        ([*first, 0, 0, 0, 0, 0], 7),
    ]
    printed = capsys.readouterr().out
    assert "weft: RESOURCE_EXHAUSTED: full; the chat is as it was" in printed
    assert "weft: stopped; the chat is as it was" in printed
    assert printed.count("Ctrl-D ends") == 2


CONFIG = {
    "base_model_name_or_path": "toy",
    "r": 4,
    "lora_alpha": 32.0,
    "target_modules": ["q_proj", "v_proj"],
    "rank_pattern": {"k_proj": 9},
}


@pytest.mark.parametrize(
    ("base", "header"), [("org/toy", True), ("/models/toy", False), (None, False)]
)
def test_a_folder_gets_what_other_programs_need(
    base: str | None, header: bool, model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    peft_extras.add(folder, "words", base, model_dir)
    assert not (folder / "chat_template.jinja").exists()
    name = base or "toy"
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    assert config == {**CONFIG, "base_model_name_or_path": name}
    card = (folder / "README.md").read_text("utf-8")
    # The Hub would refuse a path in the card's header.
    assert (f"base_model: {name}\n" in card) == header
    assert f"`{name}`: rank 4, alpha 32, on q_proj, v_proj." in card
    assert 'AutoPeftModelForCausalLM.from_pretrained("words")' in card
    assert "This folder is for PEFT." in card
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / file).read_bytes() == (model_dir / file).read_bytes()


@pytest.mark.parametrize(
    ("loader", "line"),
    [
        ("vllm", "--enable-lora --max-lora-rank 16 --lora-modules words=./words"),
        ("llama.cpp", "convert_lora_to_gguf.py words --base-model-id org/toy"),
        ("peft", 'PeftModel.from_pretrained(model, "words")'),
    ],
)
def test_a_card_has_the_lines_of_its_program(
    loader: str, line: str, tmp_path: Path
) -> None:
    parameters = ["layers.0.mlp.experts.down_proj", "layers.1.mlp.up_proj.weight"]
    # The model has image parts, so PEFT needs another class.
    more = {"target_parameters": parameters, "exclude_modules": ".*visual.*"}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**CONFIG, **more}))
    peft_extras.add(tmp_path, "words", "org/toy", None, loader)
    card = (tmp_path / "README.md").read_text("utf-8")
    assert line in card and card.count("```") == 2
    assert "on q_proj, v_proj, down_proj, up_proj." in card


@pytest.mark.parametrize(
    "wrong",
    [
        ("--lr", "-1"),
        ("--lr", "nan"),
        ("--weight-decay", "-0.1"),
        ("--max-grad-norm", "inf"),
        ("--export", "model"),
        ("--export", "/proc/nowhere"),
    ],
)
def test_numbers_and_folders_are_checked_before_the_first_call(
    wrong: tuple[str, str], tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    with pytest.raises(SystemExit) as caught:
        main(["sft", "--data", "x", "--adapter", "a", *wrong])
    assert caught.value.code == 2
    assert f"argument {wrong[0]}: {wrong[1]}" in capsys.readouterr().err
    assert [path.name for path in Path("model").iterdir()] == ["config.json"]


def test_a_run_that_gives_up_names_the_way_back(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    def away(_: object) -> None:
        raise weft.Unavailable("gone")

    monkeypatch.setattr("weft.recipes.sft.run", away)
    assert main(["sft", "--data", "x", "--adapter", "a"]) == 1
    assert "the same command with --resume goes on" in capsys.readouterr().err


def test_an_export_names_the_base_model_and_keeps_the_template(
    server: FakeWeftd,
    client: weft.Client,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    client.create_adapter("a", rank=4).snapshot("s")
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages }}")
    folder = tmp_path / "made"
    command = ["export", "--server", server.target, "--model-dir", str(model_dir)]
    command += ["--adapter", "a@s", "--output", str(folder)]

    def base(*options: str) -> object:
        files = {"adapter_config.json": json.dumps(CONFIG)}
        server.next_export({**files, "adapter_model.safetensors": "tensors"})
        assert main([*command, *options]) == 0
        config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        return config["base_model_name_or_path"]

    assert base("--chat-template", str(other), "--base-model", "org/toy") == "org/toy"
    template = folder / "chat_template.jinja"
    assert template.read_text() == other.read_text()
    card = folder / "README.md"
    assert "# made\n" in card.read_text("utf-8")
    assert base("--chat-template", str(template)) == "toy"  # The server's name.
    assert template.read_text() == other.read_text()
    missing = ["--chat-template", str(tmp_path / "no.jinja"), "--base-model", "org/b"]
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert main([*command, *missing]) == 1
    assert before == {path: path.read_bytes() for path in folder.iterdir()}
    card.write_text("My own card.")
    assert base() == "toy"
    assert not template.exists()  # The model's own is in tokenizer_config.json.
    assert card.read_text() == "My own card."
    monkeypatch.chdir(tmp_path)
    relative = Path("sub/toy")
    relative.mkdir(parents=True)
    assert base("--base-model", str(relative)) == str(relative.resolve())
    card.unlink()
    monkeypatch.chdir(folder)
    base("--output", ".")
    assert "# made\n" in card.read_text("utf-8")
    (model_dir / "config.json").write_text("{}")  # Now it is a whole model.
    assert base() == str(model_dir.resolve())


def test_an_export_has_the_servers_tokenizer(
    model_dir: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    for options in ([], [f"--model={model_dir}"]):
        with FakeWeftd(*options) as server, weft.Client(server.target) as client:
            client.create_adapter("a", rank=4)
            files = {"adapter_config.json": json.dumps(CONFIG)}
            server.next_export({**files, "adapter_model.safetensors": "tensors"})
            command = ["export", "--server", server.target, "--adapter", "a"]
            command += ["--chat-template", str(template)]
            assert main([*command, "--output", str(tmp_path / "made")]) == 0
        names = {path.name for path in (tmp_path / "made").iterdir()}
        assert ("tokenizer.json" in names) == bool(options)
        made = tmp_path / "made/chat_template.jinja"
        assert made.read_text() == template.read_text()
    assert capsys.readouterr().out.count("the export has no tokenizer") == 1


def test_an_export_that_cannot_be_completed_leaves_nothing(
    client: weft.Client, tmp_path: Path
) -> None:
    adapter = client.create_adapter("a", rank=4)
    with pytest.raises(weft.InvalidArgument, match=r"model_dir .*: no file of a tok"):
        adapter.export(tmp_path / "made", model_dir=tmp_path)
    assert list(tmp_path.glob("made*")) == []
    adapter.export(tmp_path / "made")
    names = {path.name for path in (tmp_path / "made").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
