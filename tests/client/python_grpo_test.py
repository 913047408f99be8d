"""The GRPO example's arithmetic: what it rewards and what it learns from."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import weft

EXAMPLES = Path(__file__).resolve().parents[2] / "client" / "python" / "examples"
sys.path.insert(0, str(EXAMPLES))

import grpo  # noqa: E402


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
    assert grpo.reward(reply, True, "rain") == pytest.approx(expected)


def test_a_reply_cut_off_earns_nothing() -> None:
    assert grpo.reward("Rain is water from clouds.", False, "rain") == 0.0


def test_topics_of_the_test_are_not_trained_on() -> None:
    assert not set(grpo.TRAIN_TOPICS) & set(grpo.TEST_TOPICS)


def test_advantages_are_standard_deviations_above_the_mean() -> None:
    np.testing.assert_allclose(grpo.advantages([0.0, 1.0, 0.0, 1.0]), [-1, 1, -1, 1])
    uneven = grpo.advantages([0.2, 0.2, 0.2, 1.0])
    assert uneven.mean() == pytest.approx(0.0)
    assert uneven.std() == pytest.approx(1.0)
    assert uneven.argmax() == 3


@pytest.mark.parametrize("value", [0.0, 0.2, 0.6, 1.0])
def test_equal_rewards_have_no_advantages(value: float) -> None:
    # Taking the mean of 0.2 or 0.6 away leaves rounding behind.
    assert not grpo.advantages([value] * 7).any()


def test_the_moving_average_starts_with_what_there_is() -> None:
    averages = grpo.moving_average([2.0, 4.0, 6.0, 8.0], 2)
    np.testing.assert_allclose(averages, [2, 3, 5, 7])


def sample(*tokens: int) -> weft.Sample:
    logprobs = np.full(len(tokens), -0.5, dtype=np.float32)
    return weft.Sample(list(tokens), logprobs, "stop", [])


def expect(array: weft.types.FloatArray | None, values: list[float]) -> None:
    assert array is not None
    np.testing.assert_allclose(array, np.array(values))


def test_a_batch_scores_replies_only_and_its_weights_add_up_to_one() -> None:
    group = grpo.Group(
        prompt=[5, 6, 7],
        samples=[sample(8, 9), sample(10)],
        replies=["", ""],
        rewards=[1.0, 0.0],
    )
    first, second = grpo.make_batch([group])
    assert first.tokens.tolist() == [5, 6, 7, 8]
    assert first.targets.tolist() == [6, 7, 8, 9]
    expect(first.weights, [0, 0, 1 / 3, 1 / 3])
    expect(first.logprobs, [0, 0, -0.5, -0.5])
    expect(first.advantages, [0, 0, 1, 1])
    assert second.targets.tolist() == [6, 7, 10]
    expect(second.weights, [0, 0, 1 / 3])
    expect(second.advantages, [0, 0, -1])
