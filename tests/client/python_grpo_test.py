"""Tests the GRPO example's verifier, and the loop's use of its rewards."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Capture, Options, Patch, Sent, log, wait_until
from fake_weftd import canned_logprobs

import weft
from weft.__main__ import main
from weft.recipes import Reply, adapters, grpo
from weft.recipes.replies import Group

EXAMPLES = Path(__file__).resolve().parents[2] / "client" / "python" / "examples"
sys.path.insert(0, str(EXAMPLES))

import five_words  # noqa: E402


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("Rain is water from clouds.", 1.0),
        ("  rain is water, from clouds  ", 1.0),
        ("Rain is water.", 0.5),
        ("Rain falls from thick clouds tonight.", 0.75),
        ("Rain is water that falls on us out of clouds.", 0.0),
        ("Rain.", 0.0),
        ("", 0.0),
        ("In five words, what is rain?", 0.0),
        ("Rain is in five words.", 0.0),
        ("Rain is rain and rain.", 0.0),
        ("Rain is 1 2 3", 0.0),
        ("Snow is water from clouds.", 0.0),
    ],
)
def test_rewards_five_words_about_the_topic(reply: str, expected: float) -> None:
    scored = five_words.reward(Reply(reply, True, {"topic": "rain"}))
    assert scored == pytest.approx(expected)


def test_a_reply_cut_off_earns_nothing() -> None:
    reply = Reply("Rain is water from clouds.", False, {"topic": "rain"})
    assert five_words.reward(reply) == 0.0


def test_topics_of_the_test_are_not_trained_on() -> None:
    def topics(name: str) -> set[str]:
        lines = (EXAMPLES / "data" / name).open(encoding="utf-8")
        return {json.loads(line)["topic"] for line in lines}

    assert topics("topics.jsonl") and topics("topics_test.jsonl")
    assert not topics("topics.jsonl") & topics("topics_test.jsonl")


def sample(*tokens: int) -> weft.Sample:
    logprobs = np.full(len(tokens), -0.5, dtype=np.float32)
    return weft.Sample(list(tokens), logprobs, "stop", [], prompt=[5, 6, 7])


def expect(array: weft.types.FloatArray | None, values: list[float]) -> None:
    assert array is not None
    np.testing.assert_allclose(array, np.array(values))


def test_a_batch_scores_replies_only_and_its_weights_add_up_to_one() -> None:
    group = Group("", [sample(8, 9), sample(10)], ["", ""], [1.0, 0.0])
    useless = Group("", [sample(11), sample(12)], ["", ""], [0.5, 0.5])
    first, second = grpo.make_batch([useless, group])
    assert first.tokens.tolist() == [5, 6, 7, 8]
    assert first.targets.tolist() == [6, 7, 8, 9]
    expect(first.weights, [0, 0, 1 / 3, 1 / 3])
    expect(first.logprobs, [0, 0, -0.5, -0.5])
    expect(first.advantages, [0, 0, 1, 1])
    assert second.targets.tolist() == [6, 7, 10]
    expect(second.weights, [0, 0, 1 / 3])
    expect(second.advantages, [0, 0, -1])


def samples(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "run/samples.jsonl").open()]


def test_replies_longer_than_the_context_are_named(
    base: Options, play: list[str], capsys: Capture
) -> None:
    assert main(["grpo", *base, *play, "--max-tokens", "9999999"]) == 1
    assert "--max-tokens 9999999: must be less than" in capsys.readouterr().err


def test_replies_are_kept_and_the_best_and_the_worst_shown(
    base: Options, play: list[str], tmp_path: Path, capsys: Capture
) -> None:
    command = ["grpo", *base, *play, "--prompts", "2", "--samples", "3"]
    command += ["--max-tokens", "4", "--eval-data", play[1], "--resume", "--steps"]
    assert main([*command, "2"]) == 0
    rows = samples(tmp_path)
    assert [row["step"] for row in rows] == [0] * 8 + [1] * 6 + [2] * 14
    assert [row["evaluation"] for row in rows] == (
        [True] * 8 + [False] * 12 + [True] * 8
    )
    trained = [row for row in rows if row["step"] == 1]
    assert all(row["reward"] == len(row["reply"]) + 5 for row in rows)
    assert trained[0]["prompt"].startswith("w")
    printed = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(printed) if line.startswith("step 1/2"))
    for offset, (name, choose) in enumerate((("best", max), ("worst", min)), start=1):
        row = choose(trained, key=lambda row: row["reward"])
        words = printed[first + offset].split(maxsplit=2)
        assert words == [name, f"{row['reward']:.3g}", json.dumps(row["reply"])]
    # A run that was killed leaves a part of a line, and the replies of a step that is
    # not done.
    with (tmp_path / "run/samples.jsonl").open("a") as file:
        file.write(json.dumps({**rows[-1], "step": 3}) + '\n{"step": 3, "rep')
    assert main([*command, "3"]) == 0
    assert samples(tmp_path)[: len(rows)] == rows
    assert [row["step"] for row in samples(tmp_path)[len(rows) :]] == [3] * 14
    kept = (tmp_path / "run/samples.old.jsonl").read_text().splitlines()
    assert len(kept) == len(rows) + 2 and kept[-1] == '{"step": 3, "rep'
    capsys.readouterr()
    with (tmp_path / "run/samples.jsonl").open("a") as file:
        file.write('{"step": 4, "rep')
    assert main([*command, "4"]) == 0  # Both old files are kept.
    assert (tmp_path / "run/samples.old.jsonl").read_text().splitlines() == kept
    assert len((tmp_path / "run/samples.old2.jsonl").read_text().splitlines()) == 43
    with (tmp_path / "run/samples.jsonl").open("a") as file:
        file.write("damaged\n")
    assert main([*command, "5"]) == 1
    assert "samples.jsonl:57 is not a reply of a run" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "share"), [("1.0", 1.0), ("len(reply.text)", 0.0)])
def test_groups_without_a_signal_are_counted(
    value: str, share: float, base: Options, play: list[str], tmp_path: Path
) -> None:
    (tmp_path / "score.py").write_text(f"def reward(reply):\n    return {value}\n")
    options = ["--prompts", "2", "--samples", "4", "--steps", "1"]
    assert main(["grpo", *base, *play, *options]) == 0
    assert log(tmp_path)[0]["no_signal"] == share


def test_a_run_whose_reward_raises_is_saved_and_plotted(
    base: Options, play: list[str], client: weft.Client, tmp_path: Path
) -> None:
    (tmp_path / "score.py").write_text(
        "count = 0\ndef reward(reply):\n    global count\n    count += 1\n"
        "    return 1 / (9 - count)\n"
    )
    command = ["grpo", *base, *play, "--prompts", "1", "--samples", "4"]
    with pytest.raises(ZeroDivisionError):
        main([*command, "--steps", "4"])
    assert [row["step"] for row in log(tmp_path)] == [1, 2]
    assert {c.name: c.optim_steps for c in client.checkpoints("a")} == {"step-2": 2}
    assert (tmp_path / "run/plot.png").is_file()
    (tmp_path / "score.py").write_text("def reward(reply):\n    return 1.0\n")
    assert main([*command, "--steps", "3", "--resume"]) == 0
    assert client.adapter("a").info().optim_steps == 3


def test_a_step_of_several_updates_clips_where_the_loss_does(
    base: Options,
    play: Options,
    client: weft.Client,
    tmp_path: Path,
    sent: Sent,
    capsys: Capture,
) -> None:
    command = ["grpo", *base, *play, "--prompts", "2", "--samples", "4", "--resume"]
    epsilons = ["--clip-low", "0.2", "--clip-high", "0.28", "--loss", "ppo"]
    assert main([*command, *epsilons, "--steps", "1"]) == 1
    assert "is --clip-low 0.8 --clip-high 1.2" in capsys.readouterr().err
    clip = ["--clip-low", "0.9", "--clip-high", "1.28"]
    assert main([*command, *clip, "--steps", "1"]) == 1
    message = "--loss importance_sampling does not clip; choose one of ppo, cispo, gspo"
    assert message in capsys.readouterr().err
    command += [*clip, "--loss", "ppo", "--updates", "3", "--save-every", "1"]
    assert main([*command, "--steps", "1"]) == 0
    learnt = [m for m in sent if type(m).__name__ == "ForwardBackwardRequest"]
    assert len(learnt) == 3 and learnt[0].data == learnt[1].data == learnt[2].data
    assert [(m.loss.clip_low, m.loss.clip_high) for m in learnt] == [(0.9, 1.28)] * 3
    assert client.adapter("a").info().optim_steps == 3
    assert main([*command, "--steps", "2"]) == 0
    assert client.adapter("a").info().optim_steps == 6
    assert [row["step"] for row in log(tmp_path)] == [1, 2]
    # With another number of updates, the steps that are done could not be told.
    assert main([*command, "--steps", "3", "--updates", "1"]) == 1
    assert "the run began with 3" in capsys.readouterr().err
    assert client.adapter("a").info().optim_steps == 6
    assert {c.name for c in client.checkpoints("a")} == {"step-1", "step-2"}


def test_a_run_that_ended_between_the_updates_of_a_step_goes_on_from_there(
    base: Options, play: Options, client: weft.Client, sent: Sent, monkeypatch: Patch
) -> None:
    command = ["grpo", *base, *play, "--prompts", "2", "--samples", "4"]
    command += ["--updates", "3", "--steps", "2"]
    submit_update = adapters.submit_update
    calls = itertools.count()

    def ends(*args: Any) -> adapters.Pending:
        if next(calls) == 4:  # After the first update of the second step.
            raise KeyboardInterrupt
        return submit_update(*args)

    monkeypatch.setattr(adapters, "submit_update", ends)
    assert main(command) == 130
    monkeypatch.setattr(adapters, "submit_update", submit_update)
    wait_until(lambda: client.adapter("a").info().optim_steps == 4)
    assert client.adapter("a").info().snapshots == [f"{grpo.POLICY}1"]
    drawn = [m for m in sent if type(m).__name__ == "SampleRequest"][-2:]
    assert all(m.snapshot == f"{grpo.POLICY}1" for m in drawn)
    sent.clear()
    assert main([*command, "--resume"]) == 0
    again = [m for m in sent if type(m).__name__ == "SampleRequest"]
    assert again == drawn
    info = client.adapter("a").info()
    assert (info.optim_steps, info.snapshots) == (6, [])


def test_a_step_whose_policy_is_lost_has_its_other_updates(
    base: Options, play: Options, client: weft.Client
) -> None:
    command = ["grpo", *base, *play, "--prompts", "2", "--samples", "4"]
    command += ["--updates", "3", "--save-every", "1"]
    assert main([*command, "--steps", "1"]) == 0
    client.adapter("a").optim_step()  # As of an update of an earlier version's run.
    assert main([*command, "--steps", "2", "--resume"]) == 0
    assert client.adapter("a").info().optim_steps == 6
    saved = {c.name: c.optim_steps for c in client.checkpoints("a")}
    assert saved == {"step-1": 3, "step-2": 6}


def test_advantages_hold_the_policy_near_its_start(client: weft.Client) -> None:
    group = Group("", [sample(8, 9), sample(10)], ["", ""], [1.0, 0.0])
    batch = grpo.make_batch([group])
    adapter = client.create_adapter("a")
    options = argparse.Namespace(kl_coef=0.25, temperature=1.0)
    held, kl = grpo.held_to_start(client, adapter, batch, client.info(), options)
    base = [canned_logprobs(np.array(one)) for one in ([8, 9], [10])]
    ratios = [-0.5 - one for one in base]
    assert kl == pytest.approx(float(np.concatenate(ratios).mean()))
    expect(held[0].advantages, [0, 0, *(1 - 0.25 * ratios[0])])
    expect(held[1].advantages, [0, 0, *(-1 - 0.25 * ratios[1])])
    for before, after in zip(batch, held, strict=True):
        assert after.tokens.tolist() == before.tokens.tolist()
        expect(after.weights, list(before.weights))  # type: ignore[arg-type]
        expect(after.logprobs, list(before.logprobs))  # type: ignore[arg-type]


@pytest.mark.parametrize("init", [False, True])
def test_the_distance_from_the_start_is_logged(
    init: bool,
    base: Options,
    play: Options,
    client: weft.Client,
    tmp_path: Path,
    sent: Sent,
) -> None:
    other = client.create_adapter("other", rank=4)
    other.save("best")
    options = ["--prompts", "2", "--samples", "4", "--steps", "1", "--kl-coef", "0.1"]
    options += ["--init", "other/best"] if init else []
    assert main(["grpo", *base, *play, *options, "--temperature", "0.5"]) == 0
    assert "kl_start" in log(tmp_path)[0]
    asked = [m for m in sent if type(m).__name__ == "ForwardRequest"]
    policy = ("a", adapters.START) if init else ("", "")
    assert [(m.adapter_id, m.snapshot) for m in asked] == [policy]
    assert all(m.loss.temperature == 0.5 for m in asked)


def test_groups_without_a_signal_are_still_held_to_the_start(
    base: Options, play: list[str], tmp_path: Path, sent: Sent
) -> None:
    (tmp_path / "score.py").write_text("def reward(reply):\n    return 1.0\n")
    command = ["grpo", *base, *play, "--prompts", "2", "--samples", "4"]
    assert main([*command, "--steps", "1", "--kl-coef", "0.1"]) == 0
    (learnt,) = [m for m in sent if type(m).__name__ == "ForwardBackwardRequest"]
    assert len(learnt.data) == 8 and "kl_start" in log(tmp_path)[0]
