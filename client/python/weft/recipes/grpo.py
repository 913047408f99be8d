"""GRPO: an adapter learns from a program that scores its replies."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from weft import data
from weft.adapter import Adapter
from weft.client import Client
from weft.datum import Datum
from weft.errors import InvalidArgument
from weft.recipes import adapters, loop
from weft.recipes.batches import BatchOrder
from weft.recipes.replies import Group, ReplyLog
from weft.recipes.schedule import warn_of_warmup
from weft.recipes.watch import Plot
from weft.types import FloatArray, LossOptions, OptimOptions, Sample, ServerInfo

SUMMARY = "Train an adapter by the rewards of its own replies (GRPO)."
# The metric KL(sampler || trainer) per token. The first update of a step trains the
# same weights that drew its replies, so only rounding makes the metric differ from 0.
KL = "kl_sample_train_v1:mean"
LOSSES = ("importance_sampling", "ppo", "cispo", "gspo", "dro", "stable_reinforce")
CLIPPED = ("ppo", "cispo", "gspo")
# The prefix of the snapshots that kept_policy makes.
POLICY = "weft-policy-"


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m weft grpo`."""
    adapters.add_arguments(parser)
    add = parser.add_argument
    add("--data", required=True, help='records with "messages" or "prompt"')
    add("--reward", required=True, help="FILE.py[:FUNCTION], of a Reply")
    add("--eval-data", help="prompts that are answered greedily and not learnt")
    add("--steps", type=adapters.at_least(1), default=50)
    add("--prompts", type=adapters.at_least(1), default=8, help="in a step")
    # The reward of a single reply is its group's mean, so it would teach nothing.
    add("--samples", type=adapters.at_least(2), default=8, help="of each prompt")
    add("--max-tokens", type=adapters.at_least(1), default=128, help="of a reply")
    # A temperature of 0 would draw the same reply each time.
    add("--temperature", type=adapters.number(1e-8), default=1.0)
    add("--loss", choices=LOSSES, default="importance_sampling")
    updates = "optimizer steps on the replies of a step; ratios are 1 in the first"
    add("--updates", type=adapters.at_least(1), default=1, help=updates)
    bounds = f"of the ratio itself, for {', '.join(CLIPPED)}; default: the server's"
    low, high = "lower bound, such as 0.8,", "upper bound, such as 1.2,"
    add("--clip-low", type=adapters.number(0), help=f"{low} {bounds}")
    add("--clip-high", type=adapters.number(0), help=f"{high} {bounds}")
    kl = "lowers a token's advantage by this times log(policy / base model or --init)"
    add("--kl-coef", type=adapters.number(0), default=0.0, help=kl)


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
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise InvalidArgument(
            f"--reward {file}: {name or 'reward'}: {error}; a reward takes one Reply, "
            "which has text, finished and record"
        ) from None
    except ValueError:  # A function in C may have no signature.
        pass
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
            raise InvalidArgument(
                f"a prompt of {len(tokens)} tokens > {most}, the model's context "
                "without --max-tokens"
            )
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

    def draw(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        temperature: float,
        seed: int,
        snapshot: str | None = None,
    ) -> list[list[Sample]]:
        """Returns replies to each prompt."""
        results = self._adapter.sample_many(
            [prompt.tokens for prompt in prompts],
            num_samples=samples,
            max_tokens=self._max_tokens,
            temperature=temperature,
            seed=seed,
            snapshot=snapshot,
            return_routing=self._return_routing,
        )
        return [result.samples for result in results]

    def score(
        self, prompts: Sequence[Prompt], drawn: Sequence[list[Sample]]
    ) -> list[Group]:
        """Returns a group for each prompt. Raises InvalidArgument if a reward is not a
        finite number, and whatever the reward function raises."""
        return [
            self._group(prompt, samples)
            for prompt, samples in zip(prompts, drawn, strict=True)
        ]

    def _group(self, prompt: Prompt, samples: list[Sample]) -> Group:
        texts = [self._tokenizer.decode(sample.tokens) for sample in samples]
        pairs = zip(samples, texts, strict=True)
        rewards = [self._score(prompt, sample, text) for sample, text in pairs]
        question = self._tokenizer.decode(prompt.tokens)
        return Group(question, samples, texts, rewards)

    def _score(self, prompt: Prompt, sample: Sample, text: str) -> float:
        finished = sample.finish_reason == "stop"
        value = self._reward(Reply(text, finished, prompt.record))
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise InvalidArgument(f"the reward of {text!r} is {value}, not a number")
        return number


def has_signal(group: Group) -> bool:
    """Returns whether the group's rewards differ, so that it teaches something."""
    return bool(advantages(group.rewards).any())


def make_batch(groups: Sequence[Group], *, all_groups: bool = False) -> list[Datum]:
    """Returns the training data of the groups whose rewards teach something, or of all
    groups. The server sums losses, so the weights turn the sum into the mean over all
    tokens of the replies."""
    used = [group for group in groups if all_groups or has_signal(group)]
    num_tokens = sum(len(s.tokens) for group in used for s in group.samples)
    return [
        Datum.from_sample(sample, advantage=advantage, weight=1.0 / num_tokens)
        for group in used
        for sample, advantage in zip(
            group.samples, advantages(group.rewards), strict=True
        )
    ]


def held_to_start(
    client: Client,
    adapter: Adapter,
    batch: Sequence[Datum],
    info: ServerInfo,
    options: argparse.Namespace,
) -> tuple[list[Datum], float]:
    """Returns the data with advantages that keep the policy near its reference, and the
    mean of log(policy / reference) over the replies' tokens.

    The mean estimates KL(policy || reference). The advantage of each token is lowered
    by --kl-coef * log(policy / reference), whose expected gradient is that of the KL.
    """
    before = adapters.reference(client, adapter, batch, info, options.temperature)
    held: list[Datum] = []
    ratios = []
    for datum, logprobs in zip(batch, before, strict=True):
        assert datum.logprobs is not None and datum.weights is not None
        assert datum.advantages is not None
        # Tokens of the prompt have weight 0, and both log-probabilities are 0.
        ratio = datum.logprobs - logprobs
        ratios.append(ratio[datum.weights != 0])
        held.append(copy.copy(datum))
        held[-1].advantages = datum.advantages - options.kl_coef * ratio
    return held, float(np.concatenate(ratios).mean())


def mean_reward(groups: Sequence[Group]) -> float:
    """Returns the mean reward of all replies."""
    return float(np.mean([group.rewards for group in groups]))


def loss_options(options: argparse.Namespace) -> LossOptions:
    """Returns the loss's settings. Raises InvalidArgument for bounds of a ratio that
    the loss does not clip, or that leave out 1, the ratio of an unchanged policy."""
    chosen: LossOptions = {"temperature": options.temperature}
    if options.clip_low is not None or options.clip_high is not None:
        if options.loss not in CLIPPED:
            raise InvalidArgument(
                f"--clip-low and --clip-high: --loss {options.loss} does not clip; "
                f"choose one of {', '.join(CLIPPED)}"
            )
        low, high = options.clip_low, options.clip_high
        if (low is not None and low > 1) or (high is not None and high < 1):
            raise InvalidArgument(
                f"--clip-low {low}, --clip-high {high}: they bound the ratio itself, "
                "so the lower is at most 1 and the upper at least 1; an epsilon of "
                "0.2 is --clip-low 0.8 --clip-high 1.2"
            )
        chosen |= {"clip_low": options.clip_low, "clip_high": options.clip_high}
    return chosen


def learn(
    adapter: Adapter,
    batch: Sequence[Datum],
    info: ServerInfo,
    options: argparse.Namespace,
    optim: OptimOptions,
    updates: int,
) -> adapters.Update:
    """Makes the optimizer steps of one step of the run, and returns the last one. If
    the batch is empty, they have gradient 0, because a resumed run counts optimizer
    steps."""
    pending = [
        adapters.submit_update(
            adapter, [batch], info, options.loss, loss_options(options), optim
        )
        for _ in range(updates)
    ]
    return [one.result() for one in pending][-1]


@contextmanager
def kept_policy(
    adapter: Adapter, step: int, updates: int, made: int
) -> Iterator[str | None]:
    """Keeps the weights of the start of a step of several updates as a snapshot, and
    yields its name. So a run that ended within the step draws the same replies again,
    and goes on with the step's other updates. made: the updates that the step has had.
    Yields None, for the present weights, if nothing keeps others."""
    if updates == 1:
        yield None
        return
    name = f"{POLICY}{step}"
    kept = [one for one in adapter.info().snapshots if one.startswith(POLICY)]
    if made and name not in kept:
        yield None
        return
    if not made:
        for old in kept:
            adapter.release_snapshot(old)
        adapter.snapshot(name)
    yield name
    adapter.release_snapshot(name)


def shown(groups: Sequence[Group], result: adapters.Update) -> dict[str, float]:
    """Returns a step's values for the log."""
    values = {"reward": mean_reward(groups), "grad_norm": result.grad_norm}
    if result.metrics:
        values["policy_loss"] = result.loss
    kl = [metrics[KL] for metrics in result.metrics if KL in metrics]
    if kl:
        values["kl"] = float(np.mean(kl))
    drawn = [len(sample.tokens) for group in groups for sample in group.samples]
    values["length"] = float(np.mean(drawn))
    values["no_signal"] = float(np.mean([not has_signal(group) for group in groups]))
    return values


def longest_prompt(options: argparse.Namespace, info: ServerInfo) -> int:
    """Returns the tokens that a prompt may have. Raises InvalidArgument if replies of
    --max-tokens leave no room for one."""
    context = info.model.context_length
    if options.max_tokens >= context:
        raise InvalidArgument(
            f"--max-tokens {options.max_tokens}: must be less than the model's context "
            f"of {context} tokens"
        )
    return context - int(options.max_tokens)


class Course:
    """Makes the steps of a run. done: the steps that are made, and made: the updates of
    the step behind them, if the run ended within it."""

    def __init__(
        self,
        client: Client,
        adapter: Adapter,
        player: Player,
        prompts: Sequence[Prompt],
        options: argparse.Namespace,
        info: ServerInfo,
        done: int,
        made: int,
    ) -> None:
        self._client = client
        self._adapter = adapter
        self._player = player
        self._prompts = prompts
        self._options = options
        self._info = info
        self._done = done
        self._made = made
        self._order = BatchOrder(len(prompts), options.prompts, options.seed)
        self._log = ReplyLog(options.output, done)

    def step(self, step: int, optim: OptimOptions) -> loop.Step:
        """Samples, scores and trains."""
        updates = self._options.updates
        made = self._made if step == self._done else 0
        with kept_policy(self._adapter, step, updates, made) as policy:
            return self._play(step, optim, updates - made, policy)

    def _play(
        self, step: int, optim: OptimOptions, updates: int, policy: str | None
    ) -> loop.Step:
        options = self._options
        prompts = [self._prompts[i] for i in self._order.indices(step)]
        # Prompt i of a step uses seed + i, and steps must not share seeds.
        seed = options.seed + step * options.prompts
        drawn = self._player.draw(
            prompts, options.samples, options.temperature, seed, policy
        )
        groups = self._score(step, prompts, drawn)
        lines = self._log.add(step + 1, groups, evaluation=False)
        # Without a difference of rewards, the distance still teaches.
        batch = make_batch(groups, all_groups=options.kl_coef > 0)
        more = {}
        if options.kl_coef and batch:
            batch, more["kl_start"] = held_to_start(
                self._client, self._adapter, batch, self._info, options
            )
        if not batch:
            lines.append(
                "this step teaches nothing: a prompt's replies have one reward"
            )
        result = learn(self._adapter, batch, self._info, options, optim, updates)
        num_tokens = sum(len(s.tokens) for samples in drawn for s in samples)
        return loop.Step(num_tokens, {**shown(groups, result), **more}, lines)

    def evaluate(self, step: int, held_out: Sequence[Prompt]) -> dict[str, float]:
        """Scores one greedy reply to each prompt. Does not train."""
        if not held_out:
            return {}
        drawn = self._player.draw(held_out, 1, 0.0, self._options.seed)
        groups = self._score(step, held_out, drawn)
        self._log.add(step, groups, evaluation=True)
        return {"eval_reward": mean_reward(groups)}

    def _score(
        self, step: int, prompts: Sequence[Prompt], drawn: Sequence[list[Sample]]
    ) -> list[Group]:
        if self._made and step == self._done:  # The adapter is not behind a step.
            return self._player.score(prompts, drawn)
        with adapters.saved_on_error(self._adapter, step):
            return self._player.score(prompts, drawn)


def run(options: argparse.Namespace) -> None:
    """Samples, scores, trains, evaluates and saves.

    Raises WeftError if a call fails. After an interrupt, saves the current step and
    raises KeyboardInterrupt. If the reward function raises, saves the step before.
    """
    reward = load_reward(options.reward)
    loss_options(options)
    warn_of_warmup(options.warmup, options.steps)
    with Client(options.server, timeout=options.timeout) as client:
        info = adapters.server_info(client)
        tokenizer = adapters.tokenizer(client, options)
        most = longest_prompt(options, info)
        prompts = load_prompts(options.data, tokenizer, most)
        held_out: list[Prompt] = []
        if options.eval_data:
            held_out = load_prompts(options.eval_data, tokenizer, most)
        adapter, optim_steps = adapters.open_adapter(client, options, info)
        done, made = divmod(optim_steps, options.updates)
        has_experts = info.model.expert_layers > 0
        player = Player(adapter, tokenizer, reward, options.max_tokens, has_experts)
        course = Course(client, adapter, player, prompts, options, info, done, made)
        title = f"{options.adapter}: mean reward"
        plot = Plot(["reward", "eval_reward"], title, "reward of a reply")
        steps = range(done, options.steps)

        def evaluate(step: int) -> dict[str, float]:
            return course.evaluate(step, held_out)

        loop.train(
            client,
            adapter,
            options,
            steps,
            course.step,
            evaluate,
            plot,
            within_step=made > 0,
        )
