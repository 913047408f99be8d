#!/usr/bin/env python3
"""GRPO: a small chat model learns to say what a thing is in exactly five words.

Each iteration draws a group of replies to each of a few questions, lets a
program score them, and makes those likelier that beat the mean of their group:
no reward model, no value network. The topics of the test never occur in
training; their questions are answered greedily before and after. Writes a log
(JSONL), a plot (PNG) and the adapter (a PEFT folder).

    python grpo.py --server 127.0.0.1:50051 --output out/grpo
"""

from __future__ import annotations

import argparse
import json
import random
import string
import sys
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

import weft
from weft.text import load_tokenizer

MODEL = Path(__file__).resolve().parents[3] / "models/smollm2-135m-instruct"
QUESTION = "In five words, what is {}?"
ECHO = {"in", "five", "words", "what"}
WORDS = 5
TRAIN_TOPICS = (
    "art bread chess coffee courage dust electricity fire fog freedom friendship "
    "glass gold gravity history honey hope ice iron justice language laughter "
    "light love magic milk money music paper poetry rain rice salt sand silence "
    "silk sleep smoke snow sugar tea thunder time water wind wood"
).split()
TEST_TOPICS = (
    "beauty butter cotton dancing fear grass heat jazz soup steel truth war".split()
)
SMOOTHED = 5  # Iterations in the plot's moving average.

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Group:
    """The replies drawn to one question, and what each is worth."""

    prompt: list[int]
    samples: list[weft.Sample]
    replies: list[str]
    rewards: list[float]


@dataclass(frozen=True)
class Iteration:
    """One line of the log."""

    iteration: int
    reward: float  # Mean over all replies.
    kl: float  # KL(sampler || trainer) per token: rounding alone moves it from 0.
    grad_norm: float  # Before clipping.
    groups_used: int  # Those whose rewards differ.
    tokens: int  # Drawn.
    seconds: float


def reward(reply: str, finished: bool, topic: str) -> float:
    """1 for five words, a quarter less for each word too few or too many.

    Nothing unless the reply came to its end, opens with the topic, says no word
    twice and takes none from the question. Laxer rules are soon gamed: without
    the last one the adapter learns to answer "rain is in five words".
    """
    words = [word.strip(string.punctuation) for word in reply.lower().split()]
    plain = all(map(str.isalpha, words)) and len(set(words)) == len(words)
    echo = ECHO.intersection(words)
    if not finished or not plain or echo or words[:1] != [topic]:
        return 0.0
    return max(0.0, 1.0 - abs(len(words) - WORDS) / 4)


def advantages(rewards: Sequence[float]) -> Floats:
    """How far each reward lies above its group's mean, in standard deviations.

    All zero where the rewards are equal: such a group has nothing to teach.
    """
    above = np.asarray(rewards, dtype=np.float64) - np.mean(rewards)
    spread = float(above.std())
    return above / spread if spread > 1e-6 else np.zeros_like(above)


def moving_average(values: Sequence[float], width: int) -> Floats:
    """Mean of the last `width` values; of fewer at the start."""
    ends = range(1, len(values) + 1)
    return np.array([np.mean(values[max(end - width, 0) : end]) for end in ends])


def make_datum(
    prompt: list[int], sample: weft.Sample, advantage: float, weight: float
) -> weft.Datum:
    """A reply as training data: the prompt is read, the reply is scored."""
    tokens = [*prompt, *sample.tokens]
    unscored = np.zeros(len(prompt) - 1)
    ones = np.ones(len(sample.tokens))
    return weft.Datum(
        tokens[:-1],
        tokens[1:],
        weights=np.concatenate([unscored, weight * ones]),
        logprobs=np.concatenate([unscored, sample.logprobs]),
        advantages=np.concatenate([unscored, advantage * ones]),
    )


def make_batch(groups: Sequence[Group]) -> list[weft.Datum]:
    """The groups that teach something. Losses are sums on the server; these
    weights make this one the mean over all tokens of their replies."""
    num_tokens = sum(len(s.tokens) for group in groups for s in group.samples)
    return [
        make_datum(group.prompt, sample, advantage, 1.0 / num_tokens)
        for group in groups
        for sample, advantage in zip(
            group.samples, advantages(group.rewards), strict=True
        )
    ]


class Run:
    """One adapter, and what it takes to question and to train it."""

    def __init__(self, adapter: weft.Adapter, options: argparse.Namespace) -> None:
        self._adapter = adapter
        self._options = options
        self._tokenizer = load_tokenizer(options.model)
        self._random = random.Random(options.seed)

    def ask(
        self, topics: Sequence[str], num_samples: int = 1, temperature: float = 0.0
    ) -> list[Group]:
        """A group of replies to the question about each topic."""

        def draw(topic: str, seed: int) -> Group:
            question = QUESTION.format(topic)
            prompt = self._tokenizer.encode(
                f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            ).ids
            samples = self._adapter.sample(
                prompt,
                num_samples=num_samples,
                max_tokens=self._options.max_tokens,
                temperature=temperature,
                seed=seed,
            ).samples
            replies = [self._tokenizer.decode(s.tokens).strip() for s in samples]
            rewards = [
                reward(reply, sample.finish_reason == "stop", topic)
                for reply, sample in zip(replies, samples, strict=True)
            ]
            return Group(prompt, samples, replies, rewards)

        seeds = [self._random.getrandbits(32) for _ in topics]
        # Those asked at once are decoded as one batch.
        with ThreadPoolExecutor(self._options.at_once) as pool:
            return list(pool.map(draw, topics, seeds))

    def iterate(self, number: int) -> Iteration:
        """Draws, scores, learns."""
        start = time.monotonic()
        options = self._options
        topics = self._random.sample(TRAIN_TOPICS, options.prompts)
        groups = self.ask(topics, options.group, temperature=1.0)
        used = [group for group in groups if advantages(group.rewards).any()]
        kl = grad_norm = 0.0
        if used:
            # Both are under way before the first is answered.
            gradient = self._adapter.submit.forward_backward(
                make_batch(used), options.loss
            )
            update = self._adapter.submit.optim_step(
                learning_rate=options.learning_rate,
                max_grad_norm=options.max_grad_norm,
            )
            kl = gradient.result().metrics["kl_sample_train_v1:mean"]
            grad_norm = update.result().grad_norm
        return Iteration(
            iteration=number,
            reward=mean_reward(groups),
            kl=kl,
            grad_norm=grad_norm,
            groups_used=len(used),
            tokens=sum(len(s.tokens) for group in groups for s in group.samples),
            seconds=time.monotonic() - start,
        )


def mean_reward(groups: Sequence[Group]) -> float:
    return float(np.mean([group.rewards for group in groups]))


def plot(rewards: Sequence[float], title: str, path: Path) -> None:
    """Mean reward against iteration, raw and smoothed."""
    figure = Figure(figsize=(7.2, 4.0), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    iterations = range(1, len(rewards) + 1)
    average = moving_average(rewards, SMOOTHED)
    axes.plot(iterations, rewards, "o-", color="#9bb8d3", markersize=4, linewidth=0.8)
    axes.plot(iterations, average, color="#1f4e79", linewidth=2.4)
    axes.legend(["one iteration", f"mean of the last {SMOOTHED}"], loc="lower right")
    axes.set(title=title, xlabel="iteration", ylabel="mean reward", ylim=(-0.02, 1.05))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--server", default="127.0.0.1:50051", help="HOST:PORT of weftd")
    add("--model", type=Path, default=MODEL, help="folder with the tokenizer")
    add("--output", type=Path, default=Path("grpo"), help="folder of log and plot")
    add("--iterations", type=int, default=40)
    add("--prompts", type=int, default=4, help="questions per iteration")
    add("--group", type=int, default=12, help="replies per question")
    add("--at-once", type=int, default=4, help="questions; 1: runs repeat to the bit")
    add("--max-tokens", type=int, default=16, help="of a reply")
    add("--rank", type=int, default=16)
    add("--loss", default="ppo", help="or importance_sampling, cispo, gspo, dro")
    add("--learning-rate", type=float, default=2e-4)
    add("--max-grad-norm", type=float, default=1.0)
    add("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def train(run: Run, options: argparse.Namespace) -> list[Iteration]:
    """All iterations, each printed and logged as it ends."""
    lines = []
    with open(options.output / "log.jsonl", "w", encoding="utf-8") as log:
        for number in range(1, options.iterations + 1):
            line = run.iterate(number)
            lines.append(line)
            print(json.dumps(asdict(line)), file=log, flush=True)
            print(
                f"{number:4d}  reward {line.reward:.3f}  kl {line.kl:+.1e}  "
                f"{line.tokens / line.seconds:5.0f} tokens/s  {line.seconds:4.1f} s",
                flush=True,
            )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with weft.Client(options.server) as client:
        title = f"GRPO, {client.info().model.name}: answers of exactly {WORDS} words"
        # A name of its own: others may run this on the same server.
        name = f"grpo-{uuid.uuid4().hex[:12]}"
        adapter = client.create_adapter(name, rank=options.rank, seed=options.seed)
        try:
            run = Run(adapter, options)
            before = run.ask(TEST_TOPICS)
            lines = train(run, options)
            after = run.ask(TEST_TOPICS)
            adapter.export(options.output / "adapter")
        finally:
            adapter.delete()
    plot([line.reward for line in lines], title, options.output / "reward.png")
    print(f"\nTest topics, before and after {time.monotonic() - start:.0f} s:")
    for topic, old, new in zip(TEST_TOPICS, before, after, strict=True):
        print(f"  {topic:8}{old.replies[0]}\n{'':10}{new.replies[0]}")
    print(f"Mean reward: {mean_reward(before):.2f} -> {mean_reward(after):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
