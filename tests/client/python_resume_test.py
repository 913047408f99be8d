"""Tests runs that are interrupted and resumed: what is trained again, saved and
logged."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any

import grpc
import pytest
from conftest import Capture, Options, Patch, Sent, log, wait_until
from fake_weftd import FakeWeftd

import weft
from weft.__main__ import main
from weft.recipes import Watch, adapters, plots
from weft.recipes.interrupt import Interrupt

Run = Callable[..., int]


@pytest.fixture(autouse=True)
def draft(monkeypatch: Patch) -> None:
    """Leaves plots empty, because each takes a tenth of a second. The tests of recipes
    look at plots."""
    monkeypatch.setattr(plots, "by_step", lambda path, *_, **__: path.touch())


@pytest.fixture
def run(base: Options, texts: list[str]) -> Run:
    """Returns a function that runs `sft` on the texts up to a number of steps."""

    def call(steps: int, *options: str) -> int:
        held = ["--batch", "2", "--eval-fraction", "0.25"]
        return main(["sft", *base, *texts, *held, "--steps", str(steps), *options])

    return call


def learnt(sent: Sent) -> list[Any]:
    return [m.data for m in sent if type(m).__name__ == "ForwardBackwardRequest"]


def whole(
    run: Run, client: weft.Client, sent: Sent, folder: Path, steps: int
) -> list[Any]:
    """Returns the training data of an uninterrupted run, and deletes its adapter and
    its folder."""
    assert run(steps) == 0
    data = learnt(sent)
    for checkpoint in client.checkpoints("a"):
        client.delete_checkpoint("a", checkpoint.name)
    client.delete_adapter("a")
    sent.clear()
    shutil.rmtree(folder)
    return data


def names(client: weft.Client) -> set[str]:
    return {checkpoint.name for checkpoint in client.checkpoints("a")}


def test_a_gradient_without_its_step_is_dropped(
    run: Run, client: weft.Client, sent: Sent, tmp_path: Path, capsys: Capture
) -> None:
    expected = whole(run, client, sent, tmp_path / "run", 5)
    assert run(3, "--save-every", "2") == 0
    # A run that is killed between a gradient and its step leaves this state.
    adapter = client.adapter("a")
    adapter.forward_backward([weft.Datum.next_token([1, 2, 3])])
    assert adapter.info().accumulated_tokens == 2
    assert run(5, "--resume") == 0
    printed = capsys.readouterr().out
    assert "a: its last step came 0 s ago; if another client trains it" in printed
    assert "a: dropped a gradient of 2 tokens without an update" in printed
    assert names(client) == {"step-2", "step-3", "step-5"}  # It went back to none.
    assert learnt(sent)[:3] + learnt(sent)[4:] == expected
    assert client.adapter("a").info().optim_steps == 5
    # Without the adapter, the run continues from step-3.
    client.delete_adapter("a")
    client.delete_checkpoint("a", "step-5")
    assert run(5, "--resume") == 0
    assert learnt(sent)[6:] == expected[3:]


def test_an_adapter_without_an_update_is_as_good_as_new(
    run: Run, client: weft.Client, sent: Sent, tmp_path: Path, capsys: Capture
) -> None:
    expected = whole(run, client, sent, tmp_path / "run", 2)
    adapter = client.create_adapter("a", rank=4)
    adapter.forward_backward([weft.Datum.next_token([1, 2, 3])])
    sent.clear()
    assert run(2, "--rank", "4") == 0
    assert "dropped a gradient of 2 tokens" in capsys.readouterr().out
    assert learnt(sent) == expected
    shutil.rmtree(tmp_path / "run")
    assert run(2) == 1
    assert "'a' was trained before, 2 steps: give --resume" in capsys.readouterr().err


def test_a_run_takes_over_from_a_client_that_goes_on(
    run: Run, client: weft.Client, monkeypatch: Patch, capsys: Capture
) -> None:
    assert run(2) == 0
    other = client.adapter("a")
    zero_grad = weft.Adapter.zero_grad

    def late(adapter: weft.Adapter) -> Any:
        """Comes behind a step of the other client, whose number it has."""
        monkeypatch.setattr(weft.Adapter, "zero_grad", zero_grad)
        other.forward_backward([weft.Datum.next_token([1, 2, 3])])
        return zero_grad(adapter)

    monkeypatch.setattr(weft.Adapter, "zero_grad", late)
    assert run(3, "--resume") == 0
    printed = capsys.readouterr().out
    assert "a: taken over from another client, which trained it" in printed
    assert "a: dropped a gradient of 2 tokens" in printed
    with pytest.raises(weft.AlreadyExists, match="another client trains this adapter"):
        other.optim_step()
    assert client.adapter("a").info().optim_steps == 3


def test_what_is_done_is_not_done_again(
    run: Run, client: weft.Client, sent: Sent
) -> None:
    assert run(2) == 0
    # Now it looks as if the run was killed before it wrote this checkpoint.
    client.delete_checkpoint("a", "step-2")
    for _ in range(2):
        sent.clear()
        assert run(2, "--resume") == 0
        assert not learnt(sent)
    assert names(client) == {"step-2"}
    assert client.adapter("a").info().optim_steps == 2


def test_an_adapter_that_was_made_but_not_loaded_is_loaded(
    run: Run, client: weft.Client, sent: Sent, tmp_path: Path
) -> None:
    expected = whole(run, client, sent, tmp_path / "run", 3)
    assert run(2) == 0
    client.delete_adapter("a")
    client.create_adapter("a", rank=4)
    assert run(3, "--resume") == 0
    assert learnt(sent) == expected


@pytest.fixture
def press(monkeypatch: Patch, server: FakeWeftd) -> Iterator[Callable[[int], None]]:
    """Returns a function that makes the next run get Ctrl-C `times` times while it
    waits for its first step."""
    submit, on_signal = adapters.submit_update, Interrupt._on_signal
    seen: list[int] = []
    threads: list[Thread] = []

    def note(interrupt: Interrupt, number: int, frame: FrameType | None) -> None:
        seen.append(number)
        on_signal(interrupt, number, frame)

    monkeypatch.setattr(Interrupt, "_on_signal", note)

    def press(times: int) -> None:
        def press_keys(before: int) -> None:
            # The step's two calls arrive in any order.
            wait_until(lambda: len(server.arrived()) == before + 2)
            for _ in range(times):
                seen.clear()
                os.kill(os.getpid(), signal.SIGINT)
                # The system may merge two signals that come at the same time.
                wait_until(lambda: bool(seen))
            server.release()

        def waiting(*args: Any) -> adapters.Pending:
            monkeypatch.setattr(adapters, "submit_update", submit)
            server.hold()
            before = len(server.arrived())
            threads.append(Thread(target=press_keys, args=(before,)))
            threads[-1].start()
            return submit(*args)

        monkeypatch.setattr(adapters, "submit_update", waiting)

    yield press
    for thread in threads:
        thread.join(20)


def test_ctrl_c_ends_a_run_behind_its_step_which_is_saved(
    run: Run,
    client: weft.Client,
    press: Callable[[int], None],
    sent: Sent,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    expected = whole(run, client, sent, tmp_path / "run", 3)
    handler = signal.getsignal(signal.SIGINT)
    press(1)
    assert run(3) == 130
    assert signal.getsignal(signal.SIGINT) is handler
    assert "weft: interrupted" in capsys.readouterr().err
    assert names(client) == {"step-1"} and len(learnt(sent)) == 1
    assert [row["step"] for row in log(tmp_path)] == [0, 1]
    assert run(3, "--resume") == 0
    assert learnt(sent) == expected and names(client) == {"step-1", "step-3"}


def test_a_second_ctrl_c_ends_a_run_at_once(
    run: Run, client: weft.Client, press: Callable[[int], None], tmp_path: Path
) -> None:
    press(2)
    assert run(3) == 130
    assert not names(client)
    assert [row["step"] for row in log(tmp_path)] == [0]


def test_a_run_keeps_what_it_did_and_no_other_run_writes_over_it(
    run: Run, base: Options, tmp_path: Path, capsys: Capture
) -> None:
    assert run(2) == 0
    path = tmp_path / "run/run.json"
    first = json.loads(path.read_text())
    assert (first["command"], first["adapter"]) == ("sft", "a")
    assert first["options"]["steps"] == 2 and first["options"]["lr"] == 2e-4
    assert first["model"]["name"] == "toy" and first["versions"]["server"]
    texts = (tmp_path / "texts.jsonl").read_bytes()
    assert first["data"] == {
        "data": {
            "path": str(tmp_path / "texts.jsonl"),
            "bytes": len(texts),
            "sha256": hashlib.sha256(texts).hexdigest(),
        }
    }
    whole_log = log(tmp_path)

    capsys.readouterr()
    assert run(3) == 1
    assert "holds the files of sft of adapter 'a': give --resume" in (
        capsys.readouterr().err
    )
    for resume in ([], ["--resume"]):
        assert run(3, "--adapter", "b", *resume) == 1
        assert "of adapter 'a': give another --output" in capsys.readouterr().err
    assert log(tmp_path) == whole_log and json.loads(path.read_text()) == first

    assert run(2, "--resume", "--lr", "0.5") == 0
    printed = capsys.readouterr().out
    assert "nothing left to do: a is behind step 2 of 2" in printed
    assert "--lr: 0.5, was 0.0002\n" in printed and "has changed" not in printed
    second = json.loads(path.read_text())
    assert second["options"]["lr"] == 0.5 and second["earlier"] == [first]
    assert run(2, "--resume") == 0
    third = json.loads(path.read_text())
    assert [one["options"]["lr"] for one in third["earlier"]] == [2e-4, 0.5]
    capsys.readouterr()
    (tmp_path / "same.jsonl").write_bytes(texts)  # The same data by another path.
    assert run(2, "--resume", "--data", str(tmp_path / "same.jsonl")) == 0
    assert "has changed" not in capsys.readouterr().out
    with (tmp_path / "texts.jsonl").open("a") as file:
        file.write('\n{"text": "w1 w2"}')
    assert run(2, "--resume") == 0
    assert "the file of --data has changed" in capsys.readouterr().out
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    template = ["--chat-template", str(tmp_path / "t.jinja")]
    assert run(2, "--resume", *template) == 0
    assert "the file of --chat_template has changed".replace("_", "-") in (
        capsys.readouterr().out
    )
    for text in ("{", "[]", "{}"):
        path.write_text(text)
        assert run(3, "--resume") == 1
        assert "run.json is not a file of a run" in capsys.readouterr().err


@pytest.fixture
def other(client: weft.Client) -> weft.Adapter:
    """An adapter with two checkpoints."""
    made = client.create_adapter("other", rank=4, alpha=8)
    for name in ("early", "late"):
        made.optim_step()
        made.save(name)
    return made


def loads(sent: Sent) -> list[tuple[str, str, bool]]:
    return [
        (m.source_adapter_id, m.name, m.weights_only)
        for m in sent
        if type(m).__name__ == "LoadCheckpointRequest"
    ]


def test_a_new_adapter_starts_with_another_ones_checkpoint(
    run: Run,
    client: weft.Client,
    other: weft.Adapter,
    sent: Sent,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    assert run(2, "--init", "other/no-such") == 1
    assert "no such checkpoint; those of 'other': other/" in capsys.readouterr().err
    assert run(2, "--init", "other", "--rank", "8") == 1
    assert "--rank 8: adapter 'a' has 4, by" in capsys.readouterr().err
    assert not (tmp_path / "run/run.json").exists()  # No run has begun.
    assert run(1, "--init", "other") == 0
    assert "a starts with other/late" in capsys.readouterr().out
    entry = json.loads((tmp_path / "run/run.json").read_text())
    assert entry["options"]["init"] == "other/late" and entry["options"]["alpha"] == 8
    info = client.adapter("a").info()
    assert info.config.alpha == 8 and info.snapshots == [adapters.START]
    assert info.optim_steps == 1  # It counts its own steps.
    # The server has lost the adapter: the start comes back, and then the checkpoint.
    client.delete_adapter("a")
    assert run(2, "--init", "other/early", "--resume") == 1
    assert (
        "--init other/early: the run began with other/late" in capsys.readouterr().err
    )
    sent.clear()
    assert run(2, "--resume") == 0
    assert loads(sent) == [("other", "late", True), ("", "step-1", False)]
    info = client.adapter("a").info()
    assert info.snapshots == [adapters.START] and info.optim_steps == 2
    # The adapter has the start, so its checkpoint may be gone.
    for name in ("early", "late"):
        client.delete_checkpoint("other", name)
    assert run(3, "--init", "other", "--resume") == 0


def test_init_leaves_an_adapter_that_has_weights_alone(
    run: Run, client: weft.Client, other: weft.Adapter, sent: Sent, capsys: Capture
) -> None:
    own = client.create_adapter("a", rank=4, alpha=8)
    own.snapshot("start")
    for options in ([], ["--resume"]):
        assert run(1, "--init", "other", *options) == 1
        assert "'a' exists and did not start so" in capsys.readouterr().err
    own.delete()
    assert run(1) == 0
    assert run(2, "--resume", "--init", "other") == 1
    assert "began with the base model" in capsys.readouterr().err
    assert not loads(sent)


def test_a_run_with_init_that_fails_before_its_first_step_begins_again(
    run: Run,
    client: weft.Client,
    server: FakeWeftd,
    other: weft.Adapter,
    sent: Sent,
    capsys: Capture,
) -> None:
    server.fail_run("LoadCheckpoint", grpc.StatusCode.DATA_LOSS, "broken")
    assert run(1, "--init", "other") == 1
    assert [info.adapter_id for info in client.adapters()] == ["other"]
    server.fail_run("OptimStep", grpc.StatusCode.INVALID_ARGUMENT, "no")
    assert run(1, "--init", "other") == 1
    sent.clear()
    capsys.readouterr()
    assert run(1, "--init", "other") == 0
    # What the gradient of the failed step left is gone.
    assert loads(sent) == [("other", "late", True)]
    assert "a: dropped a gradient of" in capsys.readouterr().out
    assert client.adapter("a").info().optim_steps == 1


def test_a_run_is_kept_under_its_adapters_name(
    base: Options, texts: list[str], tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    at = base.index("--output")
    assert main(["sft", *base[:at], *base[at + 2 :], *texts, "--steps", "1"]) == 0
    assert {path.name for path in (tmp_path / "run/a").iterdir()} >= {
        "log.jsonl",
        "plot.png",
        "run.json",
    }


def test_a_log_ends_where_the_adapter_is(tmp_path: Path) -> None:
    with Watch(tmp_path, 4) as watch:
        for step in range(1, 5):
            watch.step(step, 1, {"loss": float(step)})
    with Watch(tmp_path, 4, done=2) as watch:
        watch.step(3, 1, {"loss": 0.5})
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [1, 2, 0.5]
    with Watch(tmp_path, 4) as watch:  # A new run keeps the old log.
        watch.step(1, 1, {"loss": 7.0})
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1
    # The two old logs are both kept.
    assert len((tmp_path / "log.old.jsonl").read_text().splitlines()) == 4
    assert len((tmp_path / "log.old2.jsonl").read_text().splitlines()) == 3


def test_a_log_is_whole_at_any_moment_or_refused(
    run: Run, tmp_path: Path, capsys: Capture
) -> None:
    assert run(1) == 0
    whole_log = log(tmp_path)
    with Watch(tmp_path / "run", 2, done=1) as watch, pytest.raises(TypeError):
        broken: Any = object()
        watch.step(2, 1, {"loss": 0.0, "x": broken})
    assert log(tmp_path) == whole_log
    (tmp_path / "run/log.jsonl").write_text('{"step": 1, "lo')
    assert run(2, "--resume") == 1
    assert "is not a log of a run" in capsys.readouterr().err
    for text in ("[1]\n", '{"loss": 1}\n'):
        (tmp_path / "run/log.jsonl").write_text(text)
        with pytest.raises(weft.InvalidArgument, match="not a log"):
            Watch(tmp_path / "run", 1)
