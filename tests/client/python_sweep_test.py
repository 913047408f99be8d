"""Tests `python -m weft sweep` and `dpo`: many adapters at once, and preferences."""

from __future__ import annotations

import csv
import itertools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from conftest import Capture, Options, Patch, Sent, log
from fake_weftd import FakeWeftd

import weft
from weft import data
from weft.__main__ import main
from weft.recipes import adapters, dpo, plots
from weft.recipes.sweep import evaluate

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def sweep(base: Options, texts: list[str]) -> list[str]:
    command = ["sweep", *base, *texts, "--batch", "2", "--steps", "3"]
    return [*command, "--rank", "2", "4", "2", "--lr", "1e-3", "5e-5"]


def steps_of(sent: Sent, adapter: str) -> list[Any]:
    return [
        m.data
        for m in sent
        if type(m).__name__ == "ForwardBackwardRequest" and m.adapter_id == adapter
    ]


def test_all_adapters_learn_the_same_data_at_once(
    sweep: Options, client: weft.Client, tmp_path: Path, sent: Sent, capsys: Capture
) -> None:
    assert main([*sweep, "--eval-fraction", "0.25", "--eval-every", "2"]) == 0
    names = [f"a-r{rank}-lr{rate}-s0" for rank in (2, 4) for rate in ("0.001", "5e-05")]
    found = {info.adapter_id: info for info in client.adapters()}
    assert sorted(found) == sorted(names)
    for name, info in found.items():
        assert info.optim_steps == 3 and f"-r{info.config.rank}-" in name
    order = [
        (type(m).__name__, m.adapter_id)
        for m in sent
        if type(m).__name__ in ("ForwardBackwardRequest", "OptimStepRequest")
    ]
    # A step of all adapters is sent before the next step of any.
    kinds = ("ForwardBackwardRequest", "OptimStepRequest")
    assert order == [(kind, name) for name in names for kind in kinds] * 3
    assert all(steps_of(sent, name) == steps_of(sent, names[0]) for name in names)

    with (tmp_path / "run/sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["adapter"] for row in rows} == set(names)
    scores = [float(row["eval_loss"]) for row in rows]
    assert scores == sorted(scores)
    printed = capsys.readouterr().out
    table = [line.split() for line in printed.splitlines()]
    assert ["rank", "lr", "seed", "loss", "eval_loss", "adapter"] in table
    assert all(list(row.values()) in table for row in rows)
    assert len(client.checkpoints()) == 1
    logged = log(tmp_path)
    assert [row["step"] for row in logged] == [1, 2, 3]
    assert [f"eval_loss/{names[0]}" in row for row in logged] == [False, True, True]
    assert all(f"loss/{name}" in row for row in logged for name in names)
    assert (tmp_path / "run/plot.png").read_bytes().startswith(PNG)
    options = json.loads((tmp_path / "run/run.json").read_text())["options"]
    assert options["rank"] == [2, 4, 2]


def test_a_sweep_takes_no_adapter_that_exists(
    sweep: Options, client: weft.Client, tmp_path: Path, capsys: Capture
) -> None:
    client.create_adapter("a-r4-lr5e-05-s0", rank=4)
    assert main(sweep) == 1
    assert "'a-r4-lr5e-05-s0' exists: give another --adapter" in capsys.readouterr().err
    assert len(client.adapters()) == 1
    client.delete_adapter("a-r4-lr5e-05-s0")
    assert main(sweep) == 0
    assert main(sweep) == 1
    assert "files of sweep of adapter 'a': give --resume" in capsys.readouterr().err


@pytest.mark.parametrize("lost", [False, True])
def test_a_sweep_that_ended_within_a_step_goes_on_from_there(
    lost: bool,
    sweep: Options,
    client: weft.Client,
    sent: Sent,
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    assert main(sweep) == 0
    names = [info.adapter_id for info in client.adapters()]
    expected = {name: steps_of(sent, name) for name in names}
    for checkpoint in client.checkpoints():
        client.delete_checkpoint(checkpoint.adapter_id, checkpoint.name)
    for name in names:
        client.delete_adapter(name)
    shutil.rmtree(tmp_path / "run")
    sent.clear()

    submit_update = adapters.submit_update
    calls = itertools.count()

    def ends(*args: Any) -> adapters.Pending:
        """Ends the run when two of four adapters have the second step."""
        if next(calls) == 6:
            raise KeyboardInterrupt
        return submit_update(*args)

    monkeypatch.setattr(adapters, "submit_update", ends)
    assert main([*sweep, "--save-every", "1"]) == 130
    monkeypatch.setattr(adapters, "submit_update", submit_update)
    assert sorted(c.adapter_id for c in client.checkpoints()) == sorted(names)
    if lost:  # All go back to the checkpoint behind the first step.
        for name in names:
            client.delete_adapter(name)
    assert main([*sweep, "--resume"]) == 0
    for name in names:
        assert client.adapter(name).info().optim_steps == 3
        learnt = steps_of(sent, name)
        # What was made before the end, and again if it was lost with the server.
        again = 1 if lost and len(learnt) > 3 else 0
        assert learnt[:1] + learnt[1 + again :] == expected[name]
    assert [row["step"] for row in log(tmp_path)] == [1, 2, 3]
    with (tmp_path / "run/sweep.csv").open(newline="") as file:
        assert {row["adapter"] for row in csv.DictReader(file)} == set(names)
    sent.clear()
    assert main([*sweep, "--resume"]) == 0  # Nothing is left to do.
    assert not any(steps_of(sent, name) for name in names)


def test_an_adapter_that_is_behind_catches_up_alone(
    sweep: Options, client: weft.Client, tmp_path: Path, monkeypatch: Patch
) -> None:
    options = [*sweep, "--save-every", "1", "--steps", "4"]
    submit_update = adapters.submit_update
    calls = itertools.count()

    def ends(*args: Any) -> adapters.Pending:
        if next(calls) == 12:
            raise KeyboardInterrupt
        return submit_update(*args)

    monkeypatch.setattr(adapters, "submit_update", ends)
    assert main(options) == 130  # Behind the third step.
    monkeypatch.setattr(adapters, "submit_update", submit_update)
    lost = "a-r4-lr0.001-s0"
    client.delete_adapter(lost)
    for checkpoint in client.checkpoints(lost):
        client.delete_checkpoint(lost, checkpoint.name)
    assert main([*options, "--resume"]) == 0
    assert {info.optim_steps for info in client.adapters()} == {4}
    assert [row["step"] for row in log(tmp_path)] == [1, 2, 3, 4]
    saved = client.checkpoints()
    assert len(saved) == 10 and all(
        checkpoint.name == f"step-{checkpoint.optim_steps}" for checkpoint in saved
    )


def test_a_sweep_reports_each_adapters_loss(sweep: Options, sent: Sent) -> None:
    assert main([*sweep, "--eval-fraction", "0.25"]) == 0
    reports = [m for m in sent if type(m).__name__ == "ReportMetricsRequest"]
    named = {(m.adapter_id, *sorted(m.metrics)) for m in reports}
    assert ("a-r2-lr0.001-s0", "loss") in named
    assert ("a-r4-lr5e-05-s0", "eval_loss") in named
    assert all({"loss", "eval_loss"} >= {*m.metrics} for m in reports)


def test_a_sweep_needs_room_for_all_its_adapters(
    sweep: Options, client: weft.Client, capsys: Capture
) -> None:
    room = client.info().max_adapters
    seeds = [str(seed) for seed in range(room // 4 + 1)]
    assert main([*sweep, "--seed", *seeds]) == 1
    assert f"the server has room for {room} more" in capsys.readouterr().err
    assert not client.adapters()


@pytest.mark.parametrize("count", [1, 4])
def test_a_sweep_goes_on_without_adapters_that_diverge(
    count: int,
    sweep: Options,
    server: FakeWeftd,
    client: weft.Client,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    for _ in range(count):
        message = "the accumulated gradient is not finite"
        server.fail_run("OptimStep", grpc.StatusCode.FAILED_PRECONDITION, message)
    assert main([*sweep, "--eval-fraction", "0.25"]) == (count == 4)
    with (tmp_path / "run/sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["loss"] == "inf" for row in rows] == [False] * (4 - count) + [
        True
    ] * count
    steps = {info.adapter_id: info.optim_steps for info in client.adapters()}
    assert len(client.checkpoints()) == (count < 4)
    if count == 4:  # Nothing is left, so that lower rates can have the same names.
        assert "with --lr 5e-05, 0.001: give lower" in capsys.readouterr().err
        assert not steps
    else:
        assert [steps[row["adapter"]] for row in rows] == [3] * 3 + [0]


def test_a_loss_that_is_not_a_number_does_not_win(
    sweep: Options, client: weft.Client, tmp_path: Path, monkeypatch: Patch
) -> None:
    result = adapters.Pending.result
    calls = itertools.count()

    def broken(pending: adapters.Pending) -> adapters.Update:
        made = result(pending)  # Call 8 is the first adapter's third step.
        return replace(made, loss=math.nan) if next(calls) == 8 else made

    monkeypatch.setattr(adapters.Pending, "result", broken)
    assert main([*sweep, "--eval-fraction", "0"]) == 0
    with (tmp_path / "run/sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert (rows[-1]["adapter"], rows[-1]["loss"]) == ("a-r2-lr0.001-s0", "inf")
    assert client.checkpoints()[0].adapter_id != "a-r2-lr0.001-s0"

    answer = SimpleNamespace(metrics={"loss:sum": math.nan})
    future = SimpleNamespace(result=lambda: answer)
    submit = SimpleNamespace(forward=lambda part: future)
    run: Any = SimpleNamespace(adapter=SimpleNamespace(submit=submit))
    example = data.Example([1, 2], [False, True])
    assert evaluate([run], [example], client.info()) == [math.inf]


def test_a_sweep_that_fails_shows_what_it_has_and_can_begin_again(
    sweep: Options,
    server: FakeWeftd,
    client: weft.Client,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    refused = (grpc.StatusCode.INVALID_ARGUMENT, "no")
    server.fail_run("ForwardBackward", *refused)
    assert main(sweep) == 1
    made = {info.adapter_id: info.optim_steps for info in client.adapters()}
    assert 0 not in made.values()
    for name in made:
        client.delete_adapter(name)
    assert main(sweep) == 0
    assert (tmp_path / "run/sweep.csv").is_file()
    assert main([*sweep, "--output", str(tmp_path / "other")]) == 1
    assert "(weftctl adapters delete a-r2-lr0.001-s0)" in capsys.readouterr().err
    assert {info.tenant for info in client.adapters()} == {"a"}


def test_a_sweep_of_seeds_shuffles_and_starts_each_adapter_anew(
    base: Options, texts: list[str], sent: Sent
) -> None:
    command = ["sweep", *base, *texts, "--steps", "1", "--seed", "3", "7"]
    assert main([*command, "--lr", "1e-3", "--eval-fraction", "0"]) == 0
    made = [m for m in sent if type(m).__name__ == "CreateAdapterRequest"]
    assert [m.config.seed for m in made] == [3, 7]
    one, other = (steps_of(sent, m.adapter_id) for m in made)
    assert one != other


PAIRS: list[dict[str, Any]] = [
    {"prompt": f"w{n}", "chosen": f"w{n + 1} w{n + 2}", "rejected": f"w{n + 3}"}
    for n in range(1, 9)
]


def test_dpo_learns_which_answer_is_preferred(
    base: Options, client: weft.Client, tmp_path: Path, sent: Sent
) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, PAIRS)))
    options = ["--data", str(path), "--eval-fraction", "0.25", "--batch", "2"]
    options += ["--accumulate", "2", "--beta", "0.2", "--steps", "2"]
    assert main(["dpo", *base, *options]) == 0
    rows = log(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    # Here adapter and base model agree, so nothing is preferred.
    assert rows[0]["eval_loss"] == pytest.approx(np.log(2))
    assert rows[1]["loss"] == pytest.approx(np.log(2)) and rows[1]["accuracy"] == 0
    steps = [m for m in sent if type(m).__name__ == "ForwardBackwardRequest"]
    assert [len(m.data) for m in steps] == [4] * 4  # Two pairs in a batch.
    weights = [np.frombuffer(one.weights_le, "<f4") for one in steps[0].data]
    pull = 0.2 * 0.5 / 4  # beta * sigmoid(0) / pairs.
    for chosen, rejected in zip(weights[::2], weights[1::2], strict=True):
        np.testing.assert_allclose(chosen, [pull] * 3)
        np.testing.assert_allclose(rejected, [-pull] * 2)
    assert client.checkpoints("a")[0].name == "step-2"
    assert (tmp_path / "run/plot.png").read_bytes().startswith(PNG)


def test_the_gradient_of_dpo_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch")
    pairs = [
        data.Pair(
            data.Example([1, 2, 3, n], [False, False, True, True]),
            data.Example([1, 2, n], [False, False, True]),
        )
        for n in range(3)
    ]
    logprobs = [torch.randn(2 - n % 2, requires_grad=True) for n in range(6)]
    base = torch.randn(6)
    gains = torch.stack([one.sum() for one in logprobs]) - base
    margins = 0.3 * (gains[0::2] - gains[1::2])
    loss = -torch.nn.functional.logsigmoid(margins).mean()
    loss.backward()
    scores = dpo.Scores(pairs, margins.detach().numpy())
    assert scores.values()["loss"] == pytest.approx(loss.item(), rel=1e-6)
    for datum, one in zip(scores.gradient(0.3), logprobs, strict=True):
        assert datum.weights is not None and one.grad is not None
        learnt = datum.weights[-len(one) :]
        np.testing.assert_allclose(learnt, -one.grad.numpy(), rtol=1e-5)
        assert not datum.weights[: -len(one)].any()


def test_a_plot_has_no_line_between_two_points() -> None:
    page = plots.figure(4.0)
    assert page is not None
    axes = page.add_subplot()
    loss = [(float(step), 1.0 / step) for step in range(1, 21)]
    series = {"loss": loss, "eval_loss": [(0.0, 2.0), (20.0, 1.0)], "none": []}
    plots.draw(axes, series)
    plots.label(axes, title="t", x="step", y="loss (nats)")
    styles = {line.get_label(): line.get_linestyle() for line in axes.lines}
    assert styles["loss"] == "-" and styles["eval_loss"] == "None"
    assert axes.get_ylabel() == "loss (nats)"
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["loss", "eval_loss"]


def test_texts_and_messages_of_a_pair_are_joined_or_refused(model_dir: Path) -> None:
    encode = data.Encoder(data.ModelTokenizer.from_folder(model_dir))
    question = {"role": "user", "content": "w1"}

    def chat(answer: str) -> list[dict[str, str]]:
        return [question, {"role": "assistant", "content": answer}]

    # UltraFeedback's form: the prompt once more in both answers.
    both = {"chosen": chat("w2"), "rejected": chat("w3")}
    assert encode.pair({"prompt": "w1", **both}) == encode.pair(both)
    with pytest.raises(weft.InvalidArgument, match=r'"chosen" a list .* both as texts'):
        encode.pair({"prompt": "w4", **both})
    with pytest.raises(weft.InvalidArgument, match=r'"chosen" a text; write both'):
        encode.pair({"prompt": [question], "chosen": "w2", "rejected": "w3"})
