"""GRPO: an adapter learns from a program that scores its replies."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from weft import data
from weft.adapter import Adapter
from weft.client import Client
from weft.datum import Datum
from weft.errors import InvalidArgument
from weft.recipes import adapters
from weft.recipes.batches import BatchOrder
from weft.recipes.interrupt import Interrupt
from weft.recipes.watch import Watch
from weft.types import FloatArray, OptimOptions, Sample, ServerInfo

SUMMARY = "Train an adapter by the rewards of its own replies (GRPO)."
# The metric KL(sampler || trainer) per token. Each step trains the same weights that
# drew its replies, so only rounding makes the metric differ from 0.
KL = "kl_sample_train_v1:mean"
LOSSES = ("importance_sampling", "ppo", "cispo", "gspo", "dro")


@dataclass(frozen=True)
class Reply:
    """A reply that a reward function scores."""

    text: str
    finished: bool  # False: the reply was cut off at --max-tokens.
    record: Mapping[str, object]  # The record of --data that the reply answers.


# The file of --reward defines such a function, by default with the name `reward`.
Reward = Callable[[Reply], float]


@dataclass(frozen=True)
class Prompt:
    """A record and its token ids, [P]."""

    record: Mapping[str, object]
    tokens: list[int]


@dataclass(frozen=True)
class Group:
    """The samples of one prompt, and the reward of each."""

    samples: list[Sample]
    rewards: list[float]


def several(text: str) -> int:
    """Parses an argument that is at least 2. The reward of a single reply is its
    group's mean, so it would teach nothing."""
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"{value}: must be at least 2")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m weft grpo`."""
    adapters.add_arguments(parser)
    add = parser.add_argument
    add("--data", required=True, help='records with "messages" or "prompt"')
    add("--reward", required=True, help="FILE.py[:FUNCTION], of a Reply")
    add("--eval-data", help="prompts that are answered greedily and not learnt")
    add("--steps", type=adapters.positive, default=50)
    add("--prompts", type=adapters.positive, default=8, help="in a step")
    add("--samples", type=several, default=8, help="of each prompt")
    add("--max-tokens", type=adapters.positive, default=128, help="of a reply")
    add("--temperature", type=float, default=1.0)
    add("--loss", choices=LOSSES, default="importance_sampling")


def advantages(rewards: Sequence[float]) -> FloatArray:
    """Returns how far each reward lies above its group's mean, in standard
    deviations, [S].

    rewards: [S], the rewards of one prompt's replies. If all rewards are equal, all
    results are 0, because such a group has nothing to teach.
    """
    above = np.asarray(rewards, dtype=np.float64) - np.mean(rewards)
    spread = float(above.std())
    if spread <= 1e-6:
        above, spread = np.zeros_like(above), 1.0
    return (above / spread).astype(np.float32)


def load_reward(argument: str) -> Reward:
    """Returns the function that FILE.py[:FUNCTION] names. Raises InvalidArgument if
    there is none."""
    file, _, name = argument.partition(":")
    spec = importlib.util.spec_from_file_location(f"reward {file}", file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise InvalidArgument(f"--reward {file}: no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look for their module there.
    spec.loader.exec_module(module)
    function = getattr(module, name or "reward", None)
    if not callable(function):
        raise InvalidArgument(f"--reward {file}: no function {name or 'reward'}")
    return cast(Reward, function)


def load_prompts(
    source: str, tokenizer: data.ModelTokenizer, most: int
) -> list[Prompt]:
    """Reads prompts, and leaves out those of more than `most` tokens. Raises
    InvalidArgument if none is left."""
    encoder = data.Encoder(tokenizer, eos=False)

    def encode(record: Mapping[str, object]) -> Prompt:
        tokens = encoder.prompt(record)
        if len(tokens) > most:
            raise InvalidArgument(f"a prompt of {len(tokens)} tokens > {most}")
        return Prompt(record, tokens)

    return data.Dataset(source, encode).load()


class Player:
    """Samples replies from the adapter and scores them.

    return_routing: the samples record the experts of each token, and training then uses
    the same experts.
    """

    def __init__(
        self,
        adapter: Adapter,
        tokenizer: data.ModelTokenizer,
        reward: Reward,
        max_tokens: int,
        return_routing: bool = False,
    ) -> None:
        self._adapter = adapter
        self._return_routing = return_routing
        self._tokenizer = tokenizer
        self._reward = reward
        self._max_tokens = max_tokens

    def play(
        self, prompts: Sequence[Prompt], samples: int, temperature: float, seed: int
    ) -> list[Group]:
        """Returns a scored group of replies for each prompt.

        Raises InvalidArgument if a reward is not a finite number.
        """
        results = self._adapter.sample_many(
            [prompt.tokens for prompt in prompts],
            num_samples=samples,
            max_tokens=self._max_tokens,
            temperature=temperature,
            seed=seed,
            return_routing=self._return_routing,
        )
        return [
            Group(result.samples, [self._score(prompt, one) for one in result.samples])
            for prompt, result in zip(prompts, results, strict=True)
        ]

    def _score(self, prompt: Prompt, sample: Sample) -> float:
        text = self._tokenizer.decode(sample.tokens)
        finished = sample.finish_reason == "stop"
        value = self._reward(Reply(text, finished, prompt.record))
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise InvalidArgument(f"the reward of {text!r} is {value}, not a number")
        return number


def make_batch(groups: Sequence[Group]) -> list[Datum]:
    """Returns the training data of the groups that teach something. The server sums
    losses, so the weights turn the sum into the mean over all tokens of the replies."""
    scored = [(group, advantages(group.rewards)) for group in groups]
    used = [(group, values) for group, values in scored if values.any()]
    num_tokens = sum(len(s.tokens) for group, _ in used for s in group.samples)
    return [
        Datum.from_sample(sample, advantage=advantage, weight=1.0 / num_tokens)
        for group, values in used
        for sample, advantage in zip(group.samples, values, strict=True)
    ]


def mean_reward(groups: Sequence[Group]) -> float:
    """Returns the mean reward of all replies."""
    return float(np.mean([group.rewards for group in groups]))


def learn(
    adapter: Adapter,
    groups: Sequence[Group],
    info: ServerInfo,
    options: argparse.Namespace,
    optim: OptimOptions,
) -> adapters.Update:
    """Makes one optimizer step on the groups. If they teach nothing, it makes the
    step with gradient 0, because a resumed run counts optimizer steps."""
    return adapters.update(
        adapter,
        [make_batch(groups)],
        info,
        options.loss,
        {"temperature": options.temperature},
        optim,
    )


def shown(groups: Sequence[Group], result: adapters.Update) -> dict[str, float]:
    """Returns a step's values for the log."""
    values = {"reward": mean_reward(groups), "grad_norm": result.grad_norm}
    if result.metrics:
        values["loss"] = result.loss
    kl = [metrics[KL] for metrics in result.metrics if KL in metrics]
    if kl:
        values["kl"] = float(np.mean(kl))
    drawn = [len(sample.tokens) for group in groups for sample in group.samples]
    values["length"] = float(np.mean(drawn))
    return values


def run(options: argparse.Namespace) -> None:
    """Samples, scores, trains, evaluates and saves.

    Raises WeftError if a call fails. After an interrupt, saves the current step and
    raises KeyboardInterrupt.
    """
    reward = load_reward(options.reward)
    with Client(options.server, timeout=options.timeout) as client:
        info = adapters.server_info(client)
        tokenizer = adapters.tokenizer(client, options)
        most = info.model.context_length - options.max_tokens
        prompts = load_prompts(options.data, tokenizer, most)
        held_out = (
            load_prompts(options.eval_data, tokenizer, most)
            if options.eval_data
            else []
        )
        adapter, done = adapters.open_adapter(client, options)
        has_experts = info.model.expert_layers > 0
        player = Player(adapter, tokenizer, reward, options.max_tokens, has_experts)
        order = BatchOrder(len(prompts), options.prompts, options.seed)
        total: int = options.steps
        if done and adapters.is_due(done, options.save_every, total):
            adapters.save_missing(client, adapter, done)
        watch = Watch(options.output, total, options.log_format, done=done)
        with watch, Interrupt() as interrupt:

            def evaluate(step: int) -> None:
                if held_out:
                    groups = player.play(held_out, 1, 0.0, options.seed)
                    watch.note(step, "eval_reward", mean_reward(groups))

            if done == 0:
                evaluate(0)
            for step in range(done, total):
                chosen = [prompts[i] for i in order.indices(step)]
                # Prompt i of a step uses seed + i, and steps must not share seeds.
                seed = options.seed + step * options.prompts
                groups = player.play(chosen, options.samples, options.temperature, seed)
                optim = adapters.optim_options(options, step, total)
                result = learn(adapter, groups, info, options, optim)
                watch.step(
                    step + 1,
                    sum(len(s.tokens) for group in groups for s in group.samples),
                    {**shown(groups, result), "lr": optim["learning_rate"]},
                    number=result.number,
                )
                if adapters.is_due(step + 1, options.eval_every, total):
                    evaluate(step + 1)
                due = adapters.is_due(step + 1, options.save_every, total)
                if due or interrupt.asked:
                    adapters.save(adapter, step + 1)
                if interrupt.asked:
                    raise KeyboardInterrupt
            watch.plot(["reward", "eval_reward"], f"{options.adapter}: mean reward")
        if options.export:
            adapter.export(options.export)
