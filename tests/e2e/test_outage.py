"""Tests that runs outlive the absence of their server, its kills and their own. All
recipes and a script of the Tinker SDK train at once, and end with the bits of runs that
nothing disturbed. The servers are away for --away seconds.

Each program has a server of its own and small batches, because on some processors the
last bits of a row depend on the number of rows beside it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import daemon as daemon_module
import exported
import models
import pytest
import tinker_sdk
from daemon import wait_until
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models

ROOT = daemon_module.REPOSITORY
SCRIPT = ROOT / "tests" / "tinker" / "sdk_trainer.py"
STEPS = 160
LAST = f"step-{STEPS}"
SWEEP = [f"sweep-r{rank}-lr0.001-s0" for rank in (2, 4)]
PROGRAMS = ["sft", "dpo", "grpo", "sweep", "sdk"]
REWARD = "def reward(reply):\n    return sum(map(ord, reply.text)) % 17\n"


class Server:
    """A daemon that keeps its addresses across restarts."""

    def __init__(self, folder: Path) -> None:
        port, http = daemon_module.free_port(), daemon_module.free_port()
        self.address = f"127.0.0.1:{port}"
        self.url = f"http://127.0.0.1:{http}"
        self.daemon = daemon_module.Daemon(
            models.tiny_model("llama-tied"),
            folder / "server",
            *("--listen", self.address, "--tinker-listen", f"127.0.0.1:{http}"),
            *("--model-name", "toy", "--state-dir", str(folder / "state")),
        )

    def tensors(self, program: str) -> dict[str, dict[str, bytes]]:
        """Returns the bytes of weights, gradients and moments of each adapter's end."""
        if program == "sdk":
            # It names its adapters itself. Only its last run has the last step.
            (last,) = self.daemon.checkpoint_dir.glob(f"*/{LAST}")
            files = sorted(last.glob("*.safetensors"))
            return {"sdk": {file.name: file.read_bytes() for file in files}}
        found = {}
        with self.daemon.client() as client:
            for name in SWEEP if program == "sweep" else [program]:
                info = client.adapter(name).info()
                steps = 2 * STEPS if name == "grpo" else STEPS
                assert (info.optim_steps, info.accumulated_tokens) == (steps, 0), name
                found[name] = exported.saved(self.daemon, client.adapter(name), "end")
        return found


@dataclass
class Trainer:
    """A program that trains, and goes on if it is started again. It has a server of its
    own."""

    name: str
    folder: Path
    server: Server
    command: Sequence[str]
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the program, or goes on after its end."""
        resume = ["--resume"] if self.process and self.name != "sdk" else []
        with (self.folder / "output").open("ab") as output:
            self.process = subprocess.Popen(
                [*self.command, *resume],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environment,
            )

    def step(self) -> int:
        file = self.folder / ("step" if self.name == "sdk" else "log.jsonl")
        if not file.exists():
            return 0
        text = file.read_text()
        if self.name == "sdk":
            return int(text or 0)
        rows = [json.loads(line) for line in text.splitlines()]
        return int(rows[-1]["step"]) if rows else 0

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def pause(self, paused: bool) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def expect_success(self) -> None:
        assert self.process is not None
        wait_until(lambda: not self.is_running())
        assert self.process.returncode == 0, self.output()

    def output(self) -> str:
        return f"{self.name}\n{(self.folder / 'output').read_text()[-3000:]}"


def write_inputs(folder: Path) -> None:
    """Writes a tokenizer and the data of all recipes."""
    words = [f"w{n}" for n in range(100)]
    vocabulary = {word: index for index, word in enumerate([*words, "end"])}
    tokenizer = Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="end"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    config = {"eos_token": "end", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "score.py").write_text(REWARD)

    def write(name: str, record: Callable[[int], dict[str, object]]) -> None:
        lines = [json.dumps(record(n)) for n in range(80)]
        (folder / name).write_text("\n".join(lines))

    write("texts.jsonl", lambda n: {"text": " ".join(words[n : n + 2 + n % 9])})
    write(
        "pairs.jsonl",
        lambda n: {
            "prompt": words[n],
            "chosen": f"{words[n + 1]} {words[n + 2]}",
            "rejected": words[n + 3],
        },
    )
    write(
        "prompts.jsonl", lambda n: {"messages": [{"role": "user", "content": words[n]}]}
    )


OPTIONS = {
    "sft": ["--data", "texts.jsonl", "--rank", "4", "--batch", "2"],
    "dpo": ["--data", "pairs.jsonl", "--rank", "4", "--batch", "2"],
    "sweep": [
        *("--data", "texts.jsonl", "--rank", "2", "4"),
        *("--lr", "1e-3", "--batch", "1"),
    ],
    "grpo": [
        *("--data", "prompts.jsonl", "--reward", "score.py", "--rank", "4"),
        *("--prompts", "2", "--samples", "2", "--max-tokens", "5"),
        *("--updates", "2", "--loss", "ppo"),
    ],
}


def make(name: str, folder: Path, inputs: Path) -> Trainer:
    """Returns a program, and starts its server."""
    folder.mkdir(parents=True)
    server = Server(folder)
    server.daemon.start()
    if name == "sdk":
        command = [str(tinker_sdk.SDK), str(SCRIPT), "toy", str(folder), str(STEPS)]
        return Trainer(
            name, folder, server, command, tinker_sdk.environment(server.url)
        )
    options = [
        str(inputs / option) if (inputs / option).is_file() else option
        for option in OPTIONS[name]
    ]
    command = [sys.executable, "-m", "weft", name, "--adapter", name, *options]
    command += ["--server", server.address, "--model-dir", str(inputs)]
    command += ["--output", str(folder), "--steps", str(STEPS)]
    path = f"{ROOT / 'client' / 'python'}:{os.environ.get('PYTHONPATH', '')}"
    return Trainer(name, folder, server, command, {**os.environ, "PYTHONPATH": path})


def reach(trainers: Sequence[Trainer], share: float, chance: random.Random) -> None:
    """Waits until all have made this share of their steps. Those that are ahead pause
    meanwhile. Then all go on for a moment, so that they are within a step."""
    waiting = list(trainers)
    while waiting:
        for trainer in list(waiting):
            assert trainer.is_running(), trainer.output()
            if trainer.step() >= share * STEPS:
                trainer.pause(True)
                waiting.remove(trainer)
        time.sleep(0.01)
    for trainer in trainers:
        trainer.pause(False)
    time.sleep(chance.random() / 5)


@contextmanager
def paused(trainers: Sequence[Trainer]) -> Iterator[None]:
    """Holds all trainers, so that none comes to its end while servers start."""
    for trainer in trainers:
        trainer.pause(True)
    yield
    for trainer in trainers:
        trainer.pause(False)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    folder = tmp_path / "inputs"
    folder.mkdir()
    write_inputs(folder)
    return folder


@pytest.fixture
def begin(tmp_path: Path, inputs: Path) -> Iterator[Callable[[str], list[Trainer]]]:
    """Returns a function that starts all programs."""
    made: list[Trainer] = []

    def start(folder: str) -> list[Trainer]:
        new = [make(name, tmp_path / folder / name, inputs) for name in PROGRAMS]
        made.extend(new)
        for trainer in new:
            trainer.start()
        return new

    yield start
    for trainer in made:
        trainer.kill()
        trainer.server.daemon.kill()


def finish(trainers: Sequence[Trainer]) -> dict[str, dict[str, bytes]]:
    """Waits for the end of all, and returns their tensors."""
    found: dict[str, dict[str, bytes]] = {}
    for trainer in trainers:
        trainer.expect_success()
        found |= trainer.server.tensors(trainer.name)
        trainer.server.daemon.kill()
    return found


@pytest.mark.skipif(not tinker_sdk.SDK.exists(), reason="the Tinker SDK is missing")
def test_runs_end_with_the_same_bits_whatever_is_killed(
    begin: Callable[[str], list[Trainer]], request: pytest.FixtureRequest
) -> None:
    expected = finish(begin("calm"))

    struck = begin("struck")
    chance = random.Random(7)
    for part in range(1, 4):
        reach(struck, 0.1 * part, chance)
        for trainer in chance.sample(struck, 3):
            trainer.kill()
            trainer.start()
    reach(struck, 0.45, chance)
    for trainer in struck:
        trainer.server.daemon.kill()
    time.sleep(float(request.config.getoption("--away")))
    assert all(trainer.is_running() for trainer in struck), [t.output() for t in struck]
    with paused(struck):
        for trainer in struck:
            trainer.server.daemon.start()
    for part in range(5, 8):
        reach(struck, 0.1 * part, chance)
        for trainer in chance.sample(struck, 3):
            trainer.server.daemon.kill()
            trainer.server.daemon.launch()
        with paused(struck):
            for trainer in chance.sample(struck, 2):
                trainer.kill()
                trainer.server.daemon.wait_until_serving()
                trainer.start()
    tensors = finish(struck)
    assert [name for name in expected if tensors[name] != expected[name]] == []
