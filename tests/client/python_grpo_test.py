"""Tests the GRPO example's verifier, and the loop's use of its rewards."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import weft
from weft.__main__ import main
from weft.recipes import Reply, grpo

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


@pytest.mark.parametrize("samples", ["0", "1"])
def test_a_group_of_one_reply_teaches_nothing_and_is_refused(
    samples: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["grpo", "--samples", samples])
    assert caught.value.code == 2
    assert f"{samples}: must be at least 2" in capsys.readouterr().err


def test_a_batch_scores_replies_only_and_its_weights_add_up_to_one() -> None:
    group = grpo.Group(samples=[sample(8, 9), sample(10)], rewards=[1.0, 0.0])
    useless = grpo.Group(samples=[sample(11), sample(12)], rewards=[0.5, 0.5])
    first, second = grpo.make_batch([useless, group])
    assert first.tokens.tolist() == [5, 6, 7, 8]
    assert first.targets.tolist() == [6, 7, 8, 9]
    expect(first.weights, [0, 0, 1 / 3, 1 / 3])
    expect(first.logprobs, [0, 0, -0.5, -0.5])
    expect(first.advantages, [0, 0, 1, 1])
    assert second.targets.tolist() == [6, 7, 10]
    expect(second.weights, [0, 0, 1 / 3])
    expect(second.advantages, [0, 0, -1])
