"""Tests the training loops with fake_weftd: what they send, show, store and resume."""

from __future__ import annotations

import csv
import json
import shutil
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from conftest import Capture, Logs, Options, Patch, Sent, log
from fake_weftd import FakeWeftd

import weft
from weft.__main__ import main
from weft.recipes import BatchOrder, Watch, advantages, grpo, learning_rate, requests

PNG = b"\x89PNG\r\n\x1a\n"


def test_rates_rise_and_fall() -> None:
    def rates(schedule: str) -> list[float]:
        return [
            learning_rate(step, 6, 1.0, schedule=schedule, warmup=2)
            for step in range(6)
        ]

    assert rates("constant") == [0.5, 1, 1, 1, 1, 1]
    assert rates("linear") == [0.5, 1, 1, 0.75, 0.5, 0.25]
    np.testing.assert_allclose(rates("cosine")[2:], [1, 0.853553, 0.5, 0.146447], 1e-5)
    with pytest.raises(weft.InvalidArgument, match="one of constant"):
        learning_rate(0, 1, 1.0, schedule="steps")


def test_each_epoch_is_shuffled_anew_and_a_step_knows_its_place() -> None:
    order = BatchOrder(5, 2, seed=3)
    taken = [i for step in range(5) for i in order.indices(step)]
    assert sorted(taken[:5]) == sorted(taken[5:]) == list(range(5))
    assert taken[:5] != taken[5:]
    assert BatchOrder(5, 2, seed=3).indices(4) == order.indices(4)
    assert [BatchOrder(5, 5, seed=s).indices(0) for s in (1, 2)] != [taken[:5]] * 2


def test_batches_keep_to_the_servers_limits(client: weft.Client) -> None:
    info = client.info()
    small = SimpleNamespace(
        max_data_per_request=3, max_tokens_per_request=10, max_message_bytes=1 << 20
    )
    assert info.max_data_per_request > 0
    data = [weft.Datum.next_token([1] * n) for n in (3, 3, 3, 3, 10, 12, 2)]
    cut = list(requests(data, small))  # type: ignore[arg-type]
    # A record that exceeds the limit by itself is sent anyway, so that the
    # server refuses it.
    assert [len(r) for r in cut] == [3, 1, 1, 1, 1]
    assert [d for r in cut for d in r] == data


def test_batches_count_the_bytes_of_soft_targets_and_of_routing() -> None:
    limits = SimpleNamespace(
        max_data_per_request=100, max_tokens_per_request=1 << 20, max_message_bytes=5000
    )
    ids, table = np.ones(100, int), np.ones([100, 8], int)
    plain = weft.Datum(ids, ids)  # 800 bytes
    routed = weft.Datum(ids, ids, routing=table)  # 2400
    soft = weft.Datum(ids, table[:, :4], table[:, :4])  # 3600
    held = weft.Datum(ids, ids, support=[range(1, 5)] * 100)  # 2800
    for datum, most in ((plain, 4), (routed, 1), (soft, 1), (held, 1)):
        cut = list(requests([datum] * 4, limits))  # type: ignore[arg-type]
        assert [len(r) for r in cut] == [most] * (4 // most)


def test_sft_trains_evaluates_saves_and_logs(
    base: Options,
    texts: Options,
    client: weft.Client,
    tmp_path: Path,
    sent: Sent,
    capsys: Capture,
    caplog: Logs,
) -> None:
    options = ["--steps", "4", "--batch", "2", "--accumulate", "2"]
    options += ["--eval-fraction", "0.25", "--eval-every", "2", "--save-every", "3"]
    options += ["--warmup", "2", "--lr", "0.5", "--schedule", "linear"]
    assert main(["sft", *base, *texts, *options]) == 0
    printed = capsys.readouterr().out
    assert "texts.jsonl:9: not JSON" in caplog.text
    assert "8 records, 1 left out" in printed
    assert "tokens/s" in printed and "ETA" in printed
    rows = log(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [("eval_loss" in row) for row in rows] == [True, False, True, False, True]
    assert [row["lr"] for row in rows[1:]] == [0.25, 0.5, 0.5, 0.25]
    assert (tmp_path / "run/plot.png").read_bytes().startswith(PNG)
    saved = {c.name: c.optim_steps for c in client.checkpoints("a")}
    assert saved == {"step-3": 3, "step-4": 4}

    steps = [m for m in sent if type(m).__name__ == "ForwardBackwardRequest"]
    assert len(steps) == 2 * 4 and all(len(m.data) == 2 for m in steps)
    weights = [
        np.frombuffer(datum.weights_le, "<f4")
        for message in steps[:2]
        for datum in message.data
    ]
    assert sum(w.sum() for w in weights) == pytest.approx(1.0)  # The loss is a mean.
    updates = [m for m in sent if type(m).__name__ == "OptimStepRequest"]
    assert all(m.adamw.max_grad_norm == 1.0 for m in updates)


def test_a_trained_adapter_is_taken_up_only_where_asked(
    base: Options,
    texts: Options,
    client: weft.Client,
    tmp_path: Path,
    sent: Sent,
    capsys: Capture,
) -> None:
    command = ["sft", *base, *texts, "--batch", "2"]
    assert main([*command, "--steps", "5"]) == 0
    whole = [m.data for m in sent if type(m).__name__ == "ForwardBackwardRequest"]
    client.adapter("a").delete()
    sent.clear()
    shutil.rmtree(tmp_path / "run")

    assert main([*command, "--steps", "2"]) == 0
    other = ["--output", str(tmp_path / "other")]
    assert main([*command, "--steps", "5", *other]) == 1
    assert "2 steps: give --resume" in capsys.readouterr().err
    assert main([*command, "--steps", "3", "--resume"]) == 0
    # Deletes the adapter, and the first run's checkpoint step-5, which is later
    # than step-3. So the next run continues from step-3.
    client.adapter("a").delete()
    client.delete_checkpoint("a", "step-5")
    assert main([*command, "--steps", "5", "--resume"]) == 0
    assert client.adapter("a").info().optim_steps == 5
    parts = [m.data for m in sent if type(m).__name__ == "ForwardBackwardRequest"]
    assert parts == whole
    assert [row["step"] for row in log(tmp_path) if "loss" in row][-3:] == [3, 4, 5]


def test_csv_is_a_log_too(base: Options, texts: list[str], tmp_path: Path) -> None:
    command = ["sft", *base, *texts, "--log-format", "csv", "--eval-data", texts[1]]
    assert main([*command, "--steps", "1"]) == 0
    assert main([*command, "--steps", "2", "--resume"]) == 0
    with (tmp_path / "run/log.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["step"]) for row in rows] == [0, 1, 2]
    assert float(rows[1]["loss"]) > 0 and rows[0]["loss"] == ""


def test_wandb_and_mlflow_get_values_and_settings_where_they_are_asked_for(
    tmp_path: Path, monkeypatch: Patch, caplog: Logs
) -> None:
    seen: list[tuple[Any, ...]] = []

    def recorder(name: str) -> Any:
        return lambda *args, **kwargs: seen.append((name, *args, kwargs))

    run = SimpleNamespace(log=recorder("log"), finish=recorder("finish"))

    def init(**kwargs: Any) -> Any:
        seen.append(("init", kwargs))
        return run

    calls = ("start_run", "log_params", "log_metrics", "end_run")
    fakes = {
        "wandb": SimpleNamespace(init=init),
        "mlflow": SimpleNamespace(**{name: recorder(name) for name in calls}),
    }
    for name, fake in fakes.items():
        fake.__spec__ = SimpleNamespace()
        monkeypatch.setitem(sys.modules, name, fake)
    for asked in (False, True):
        if asked:
            monkeypatch.setenv("WANDB_PROJECT", "p")
            monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path))
        with Watch(tmp_path / "a", 1, settings={"lr": 0.5}) as watch:
            watch.note(0, "eval_loss", 0.25)
        assert bool(seen) == asked
    settings = {"lr": 0.5}
    folder = str(tmp_path / "a")
    assert seen == [
        ("init", {"name": "a", "dir": folder, "config": settings}),
        ("start_run", {"run_name": "a"}),
        ("log_params", settings, {}),
        ("log", {"eval_loss": 0.25}, {"step": 0}),
        ("log_metrics", {"eval_loss": 0.25}, {"step": 0}),
        ("finish", {"exit_code": 0}),
        ("end_run", {"status": "FINISHED"}),
    ]
    seen.clear()
    with pytest.raises(KeyError), Watch(tmp_path / "a", 1):
        raise KeyError
    assert seen[-2:] == [
        ("finish", {"exit_code": 1}),
        ("end_run", {"status": "FAILED"}),
    ]
    fakes["mlflow"].log_metric = run.log = None  # Each call raises.
    fakes["mlflow"].start_run = None
    seen.clear()
    with Watch(tmp_path / "a", 2) as watch:
        for step in (1, 2):
            watch.step(step, 1, {"loss": 0.5})
    assert [name for name, *_ in seen] == ["init"]
    assert caplog.text.count("left out") == 2
    assert len((tmp_path / "a/log.jsonl").read_text().splitlines()) == 2


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    with Watch(tmp_path, 2) as watch:
        watch.step(1, 10, {"loss": 0.5})
        watch.step(2, 10, {"loss": 0.25})
        watch.note(2, "eval_loss", 0.75)
    (path,) = tmp_path.glob("events.out.tfevents.*")
    rest = path.read_bytes()  # The end of the run has written all of it.
    found: dict[tuple[str, int], float] = {}
    while rest:  # A record: a length, its checksum, an event, its checksum.
        (size,) = struct.unpack("<Q", rest[:8])
        event = Event.FromString(rest[12 : 12 + size])
        rest = rest[16 + size :]
        for value in event.summary.value:
            if value.tag in ("loss", "eval_loss"):
                found[value.tag, event.step] = value.simple_value
    assert found == {("loss", 1): 0.5, ("loss", 2): 0.25, ("eval_loss", 2): 0.75}


def test_a_log_has_one_of_two_forms(tmp_path: Path) -> None:
    with pytest.raises(weft.InvalidArgument, match="one of jsonl, csv"):
        Watch(tmp_path, 1, "xml")


def test_advantages_are_standard_deviations_above_the_mean() -> None:
    np.testing.assert_allclose(advantages([0.0, 1.0, 0.0, 1.0]), [-1, 1, -1, 1])
    uneven = advantages([0.2, 0.2, 0.2, 1.0])
    assert uneven.mean() == pytest.approx(0.0, abs=1e-6)
    assert uneven.std() == pytest.approx(1.0) and uneven.argmax() == 3
    for value in (0.0, 0.2, 0.6, 1.0):  # Rounding errors must not become an advantage.
        assert not advantages([value] * 7).any()


def test_grpo_draws_scores_and_learns(
    base: Options, play: Options, client: weft.Client, tmp_path: Path, sent: Sent
) -> None:
    options = ["--steps", "2", "--prompts", "4", "--samples", "3", "--max-tokens", "3"]
    options += ["--eval-data", play[1], "--temperature", "0.5"]
    assert main(["grpo", *base, *play, *options]) == 0
    rows = log(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "eval_reward" in rows[0] and "eval_reward" in rows[2]
    assert rows[1]["reward"] > 5 and rows[1]["length"] == 3
    drawn = [m for m in sent if type(m).__name__ == "SampleRequest"]
    learnt = [m for m in sent if type(m).__name__ == "ForwardBackwardRequest"]
    assert sum(m.num_samples == 3 for m in drawn) == 8 and len(learnt) == 2
    seeds = [m.config.seed for m in drawn if m.num_samples == 3]
    assert len(set(seeds)) == len(seeds)
    assert learnt[0].loss.temperature == 0.5
    assert client.checkpoints("a")[0].name == "step-2"


def test_grpo_of_equal_rewards_takes_a_step_without_a_gradient(
    base: Options, play: list[str], client: weft.Client, tmp_path: Path
) -> None:
    (tmp_path / "score.py").write_text("def same(reply):\n    return 1.0\n")
    play[-1] += ":same"
    assert main(["grpo", *base, *play, "--steps", "1", "--prompts", "2"]) == 0
    # A step without a gradient is counted too. A resumed run continues after it.
    assert client.adapter("a").info().optim_steps == 1
    assert "loss" not in log(tmp_path)[0]


def test_grpo_waits_out_every_refusal_of_a_large_batch(
    base: Options, play: list[str], server: FakeWeftd, tmp_path: Path
) -> None:
    server.retry_hint(5)
    for _ in range(40):
        server.refuse("Sample", grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    options = ["--prompts", "64", "--samples", "8", "--max-tokens", "256"]
    assert main(["grpo", *base, *play, *options, "--steps", "1"]) == 0
    assert log(tmp_path)[0]["length"] == 256


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')", "None", "'good'"])
def test_a_reward_is_a_number(
    value: str, base: Options, play: list[str], tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "score.py").write_text(f"def reward(reply):\n    return {value}\n")
    assert main(["grpo", *base, *play, "--steps", "1"]) == 1
    assert "not a number" in capsys.readouterr().err


def test_a_reward_file_is_a_module_like_others(tmp_path: Path) -> None:
    path = tmp_path / "score.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Score:\n    value: float\n"
        "def reward(reply):\n    return Score(0.5).value\n"
    )
    assert grpo.load_reward(str(path))(grpo.Reply("", True, {})) == 0.5


def test_an_epoch_is_shuffled_once(monkeypatch: Patch) -> None:
    made: list[Any] = []
    real = np.random.default_rng

    def counted(seed: Any) -> np.random.Generator:
        made.append(seed)
        return real(seed)

    monkeypatch.setattr(np.random, "default_rng", counted)
    order = BatchOrder(10, 4, seed=1)
    for step in range(5):
        order.indices(step)
    assert made == [[1, 0], [1, 1]]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "no Python file"),
        ("x = 1\n", "no function reward"),
        (
            "def reward(prompt, completion):\n    return 1.0\n",
            "reward: missing a required argument: 'completion'; a reward takes one",
        ),
        ("def reward(*, text):\n    return 1.0\n", "takes one Reply"),
    ],
)
def test_a_reward_must_be_there(tmp_path: Path, text: str | None, reason: str) -> None:
    path = tmp_path / "score.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(weft.InvalidArgument, match=reason):
        grpo.load_reward(str(path))


PAIR = {"prompt": "w1", "chosen": "w2", "rejected": "w3"}


@pytest.mark.parametrize(
    ("recipe", "options", "warning"),
    [
        ("dpo", ["--beta", "0"], "--beta 0: no pair teaches anything\n"),
        ("dpo", ["--warmup", "3"], "--warmup 3: of 2 steps, none has the full rate"),
        ("dpo", ["--warmup", "2"], ""),
        ("grpo", ["--warmup", "3"], "--warmup 3: of 2 steps, none has the full rate"),
        ("grpo", [":same"], "this step teaches nothing: a prompt's replies have"),
        ("grpo", [], ""),
    ],
)
def test_what_teaches_nothing_is_said(
    recipe: str,
    options: Options,
    warning: str,
    base: Options,
    play: Options,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    words = [*base, "--steps", "2"]
    if recipe == "dpo":
        pairs = tmp_path / "pairs.jsonl"
        pairs.write_text((json.dumps(PAIR) + "\n") * 4)
        words += ["--data", str(pairs)]
    else:
        code = "\ndef same(reply):\n    return 1.0\n"
        with (tmp_path / "score.py").open("a") as file:
            file.write(code)
        words += [*play, "--prompts", "2"]
        if options == [":same"]:
            words[words.index("--reward") + 1] += options.pop()
    assert main([recipe, *words, *options]) == 0
    printed = capsys.readouterr().out
    assert warning in printed
    if not warning:
        assert "--" not in printed and "teaches nothing" not in printed


def test_a_plot_that_is_not_drawn_is_said(
    base: Options, texts: Options, monkeypatch: Patch, capsys: Capture, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["sft", *base, *texts, "--steps", "1"]) == 0
    assert "no plot.png: pip install matplotlib\n" in capsys.readouterr().out
    assert not (tmp_path / "run/plot.png").exists()


def test_what_an_export_leaves_out_is_said(
    base: Options, texts: Options, server: FakeWeftd, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "t.jinja").write_text("{% if thinking %}{% endif %}")
    options = ["--chat-template", str(tmp_path / "t.jinja")]
    options += ["--chat-template-kwargs", '{"thinking": 1}', "--steps", "1"]
    config = {"base_model_name_or_path": "b", "r": 4, "lora_alpha": 1}
    files = {"adapter_config.json": json.dumps({**config, "target_modules": "x"})}
    server.next_export({**files, "adapter_model.safetensors": "tensors"})
    command = ["sft", *base, *texts, *options]
    assert main([*command, "--export", str(tmp_path / "made")]) == 0
    assert "no place for --chat-template-kwargs" in capsys.readouterr().out
