"""A sweep: adapters of several ranks, learning rates and seeds learn at once."""

from __future__ import annotations

import argparse
import csv
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from weft import data
from weft.adapter import Adapter
from weft.channel import Security
from weft.client import Client
from weft.datum import Datum
from weft.errors import DeadlineExceeded, FailedPrecondition, Unavailable, WeftError
from weft.recipes import adapters, plots, runs, sft
from weft.recipes.batches import BatchOrder, requests
from weft.recipes.interrupt import Interrupt
from weft.recipes.watch import Watch
from weft.types import ServerInfo

SUMMARY = "Train adapters of several ranks, learning rates and seeds at once."
TABLE = "sweep.csv"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m weft sweep`."""
    adapters.add_common_arguments(parser)
    sft.add_data_arguments(parser)
    sft.add_turn_arguments(parser)
    add = parser.add_argument
    names = "the adapters are ADAPTER-rRANK-lrLR-sSEED"
    add("--adapter", required=True, help=names)
    ranks = "LoRA ranks"
    add("--rank", type=adapters.at_least(1), nargs="+", default=[16], help=ranks)
    rates = "learning rates at their highest"
    add("--lr", type=adapters.RATE, nargs="+", default=[1e-4, 2e-4, 5e-4], help=rates)
    parser.set_defaults(init=None)
    adapters.add_course_arguments(parser)
    seeds = f"{adapters.SEED}; the first one chooses what is held out"
    add("--seed", type=adapters.at_least(0), nargs="+", default=[0], help=seeds)


@dataclass(frozen=True)
class Run:
    """One adapter of the sweep, and the options with which `sft` would train it."""

    adapter: Adapter
    options: argparse.Namespace
    order: BatchOrder
    done: int  # The steps that it has made when the sweep begins, or goes on.

    @property
    def label(self) -> str:
        """Returns what tells this run from the others."""
        one = self.options
        return f"rank {one.rank}, lr {one.lr:g}, seed {one.seed}"


def open_runs(
    client: Client, options: argparse.Namespace, info: ServerInfo, count: int
) -> list[Run]:
    """Makes the adapters, or, with --resume, goes on with those that are there. Raises
    FailedPrecondition if one exists otherwise, or if the server has no room for all.

    Without a token, which has its tenant, they belong to the tenant --adapter, so that
    a sweep takes the share of one tenant.
    """
    taken = {adapter.adapter_id for adapter in client.adapters()}
    chosen = []
    values = map(dict.fromkeys, (options.rank, options.lr, options.seed))
    for rank, rate, seed in itertools.product(*values):
        name = f"{options.adapter}-r{rank}-lr{rate:g}-s{seed}"
        if name in taken and not options.resume:
            raise FailedPrecondition(
                f"adapter {name!r} exists: give another --adapter, or delete it "
                f"(weftctl adapters delete {name})"
            )
        own = {"adapter": name, "rank": rank, "lr": rate, "seed": seed}
        if not Security.from_environment().token:
            own["tenant"] = options.tenant or options.adapter
        chosen.append(argparse.Namespace(**{**vars(options), **own}))
    room = info.max_adapters - info.num_adapters
    new = sum(one.adapter not in taken for one in chosen)
    if new > room:
        raise FailedPrecondition(
            f"{new} adapters: the server has room for {room} more "
            "(--max-adapters); give fewer values, or delete adapters"
        )
    per_step = options.batch * options.accumulate
    made: list[Run] = []
    with deleted_on_error(made):
        for one in chosen:
            order = BatchOrder(count, per_step, one.seed)
            adapter, done = adapters.take(client, one)
            made.append(Run(adapter, one, order, done))
    return made


@contextmanager
def deleted_on_error(runs_: Sequence[Run]) -> Iterator[None]:
    """If a call fails, deletes the adapters that made no update, so that the sweep can
    begin again with their names."""
    try:
        yield
    except (Unavailable, DeadlineExceeded):
        raise  # The server would not hear of it.
    except WeftError:
        with suppress(WeftError):
            for one in runs_:
                if one.adapter.info().optim_steps == 0:
                    one.adapter.delete()
        raise


def learn(
    runs_: Sequence[Run],
    examples: Sequence[data.Example],
    info: ServerInfo,
    step: int,
    total: int,
) -> tuple[int, list[float]]:
    """Makes step `step` of every run. Sends all of it before it waits, so that the
    server trains all adapters in one batch. Returns the number of tokens, and the loss
    of each run; infinity for a run that has diverged. A run that made the step before
    the sweep went on is only scored."""
    num_tokens = 0
    pending: list[Callable[[], float]] = []
    for run_ in runs_:
        batch = sft.weighted([examples[i] for i in run_.order.indices(step)])
        num_tokens += sum(len(datum.tokens) for datum in batch)
        parts = sft.batches(batch, run_.options.batch)
        if step < run_.done:
            pending.append(_scored(run_.adapter, parts, info))
            continue
        optim = adapters.optim_options(run_.options, step, total)
        update = adapters.submit_update(
            run_.adapter, parts, info, "cross_entropy", {}, optim
        )
        pending.append(partial(_loss_of, update))
    return num_tokens, [loss() for loss in pending]


def _loss_of(update: adapters.Pending) -> float:
    return math.inf if update.diverged() else _comparable(update.result().loss)


def _scored(
    adapter: Adapter, parts: Sequence[Sequence[Datum]], info: ServerInfo
) -> Callable[[], float]:
    """Scores the data, and returns a function that waits for their loss."""
    pending = [
        adapter.submit.forward(request)
        for part in parts
        for request in requests(part, info)
    ]
    return lambda: _comparable(sum(one.result().metrics["loss:sum"] for one in pending))


def _comparable(loss: float) -> float:
    """Returns the loss, or infinity for NaN, which has no place in an order."""
    return loss if math.isfinite(loss) else math.inf


def evaluate(
    runs_: Sequence[Run], examples: Sequence[data.Example], info: ServerInfo
) -> list[float]:
    """Returns the mean loss per learnt token of each run, all computed at once;
    infinity for one that is not a number."""
    parts = list(requests([example.datum() for example in examples], info))
    pending = [[run_.adapter.submit.forward(part) for part in parts] for run_ in runs_]
    learnt = sum(example.num_learnt for example in examples)
    return [
        _comparable(sum(one.result().metrics["loss:sum"] for one in futures) / learnt)
        for futures in pending
    ]


@dataclass(frozen=True)
class Result:
    """A run at its end."""

    run: Run
    loss: float
    eval_loss: float | None  # None: nothing is held out.

    @property
    def score(self) -> float:
        """Returns the loss by which runs are compared."""
        return self.loss if self.eval_loss is None else self.eval_loss


def show(results: Sequence[Result], folder: Path) -> None:
    """Prints a table of the runs, the best one first, and writes it to sweep.csv. A run
    that has diverged has the loss inf."""
    if not results:
        return
    names = ("rank", "lr", "seed", "loss", "eval_loss", "adapter")
    rows = [
        (
            str(one.run.options.rank),
            f"{one.run.options.lr:g}",
            str(one.run.options.seed),
            f"{one.loss:.4f}",
            "" if one.eval_loss is None else f"{one.eval_loss:.4f}",
            one.run.adapter.id,
        )
        for one in sorted(results, key=lambda one: one.score)
    ]
    with (folder / TABLE).open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([names, *rows])
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    for row in (names, *rows):
        cells = zip(row, widths, strict=True)
        print("  ".join(cell.ljust(width) for cell, width in cells).rstrip())


def draw(results: Sequence[Result], watch: Watch, path: Path, title: str) -> None:
    """Draws the loss of each run by step, and the final losses by learning rate: a
    point for each seed, and a line through the means of each rank."""
    page = plots.figure(11.0, 4.4)
    if page is None or not results:
        return
    course, final = page.subplots(1, 2)
    series = {
        one.run.label: watch.points(f"loss/{one.run.adapter.id}") for one in results
    }
    plots.draw(course, series, raw=False)
    plots.label(course, title=title, x="step", y="loss per token (nats)")
    for index, rank in enumerate(sorted({one.run.options.rank for one in results})):
        scores: dict[float, list[float]] = {}
        for one in sorted(results, key=lambda one: one.run.options.lr):
            if one.run.options.rank == rank:
                scores.setdefault(one.run.options.lr, []).append(one.score)
        for rate, found in scores.items():
            final.plot([rate] * len(found), found, "o", color=f"C{index}")
        means = [sum(found) / len(found) for found in scores.values()]
        dash = plots.DASHES[index % len(plots.DASHES)]
        final.plot(list(scores), means, dash, color=f"C{index}", label=f"rank {rank}")
    rates = sorted({one.run.options.lr for one in results})
    final.set_xscale("log")
    final.set_xticks(rates, labels=[f"{rate:g}" for rate in rates])
    final.minorticks_off()
    kind = "loss" if results[0].eval_loss is None else "eval_loss"
    plots.label(
        final, title="At the end", x="learning rate", y=f"{kind} per token (nats)"
    )
    page.savefig(path)


def finish(
    made: Sequence[tuple[Run, float]],
    held_out: Sequence[data.Example],
    info: ServerInfo,
) -> list[Result]:
    """Evaluates the runs, each with its loss, if anything is held out."""
    scores: Sequence[float | None] = [None] * len(made)
    if held_out:
        scores = evaluate([one for one, _ in made], held_out, info)
    return [Result(*one, score) for one, score in zip(made, scores, strict=True)]


def best(results: Sequence[Result]) -> Result:
    """Returns the run with the lowest loss."""
    return min(results, key=lambda one: one.score)


def note(watch: Watch, step: int, results: Sequence[Result]) -> None:
    """Logs the evaluation of all runs, and prints the lowest loss."""
    scores = {
        f"eval_loss/{one.run.adapter.id}": one.eval_loss
        for one in results
        if one.eval_loss is not None
    }
    if scores:
        watch.note(step, "lowest_eval_loss", min(scores.values()), more=scores)


@dataclass
class Progress:
    """The results of the runs so far."""

    results: list[Result] = field(default_factory=list)
    diverged: list[Result] = field(default_factory=list)


def train(
    members: Sequence[Run],
    examples: sft.Split[data.Example],
    info: ServerInfo,
    options: argparse.Namespace,
    steps: range,
    watch: Watch,
    progress: Progress,
) -> None:
    """Makes the steps, and saves the best adapter. Raises
    FailedPrecondition if all have diverged. After an interrupt, ends with the current
    step, saves all adapters and raises KeyboardInterrupt."""
    total = steps.stop
    with Interrupt() as interrupt:
        for step in steps:
            num_tokens, losses = learn(members, examples.train, info, step, total)
            made = list(zip(members, losses, strict=True))
            progress.diverged += [Result(*m, None) for m in made if m[1] == math.inf]
            made = [one for one in made if one[1] != math.inf]
            members = [one for one, _ in made]
            ends = interrupt.asked or step + 1 == total
            due = ends or adapters.is_due(step + 1, options.eval_every, total)
            held_out = examples.held_out if due else []
            progress.results = finish(made, held_out, info)
            if all(math.isinf(one.score) for one in progress.results):
                rates = ", ".join(f"{rate:g}" for rate in sorted(set(options.lr)))
                raise FailedPrecondition(
                    f"all adapters have diverged, with --lr {rates}: give lower rates"
                )
            watch.step(
                step + 1,
                num_tokens,
                {
                    "lowest_loss": min(losses),
                    "highest_loss": max(loss for _, loss in made),
                },
                more={f"loss/{one.adapter.id}": loss for one, loss in made},
            )
            note(watch, step + 1, progress.results)
            saves = adapters.is_due(step + 1, options.save_every, total)
            if interrupt.asked or (saves and not ends):
                for one in members:
                    adapters.save(one.adapter, step + 1)
            elif ends:
                adapters.save(best(progress.results).run.adapter, step + 1)
            if ends:
                break
        if interrupt.asked:
            raise KeyboardInterrupt


def first_step(members: Sequence[Run], total: int) -> int:
    """Returns the step with which the sweep begins or goes on: that of the adapters
    that are ahead, if all of them are at the same one, else the one before, which the
    others of them have not made. The last step is scored again if it is made, because
    the results may be missing."""
    ahead = max(one.done for one in members)
    if any(one.done == ahead - 1 for one in members):
        ahead -= 1
    return min(ahead, total - 1)


def catch_up(
    members: Sequence[Run],
    examples: Sequence[data.Example],
    info: ServerInfo,
    first: int,
    total: int,
) -> list[Run]:
    """Makes the steps before `first` of those that are behind, such as one whose
    checkpoints are lost, or that had diverged. Returns those that have them."""
    kept = []
    for one in members:
        losses = [0.0]
        for step in range(one.done, first):
            _, losses = learn([one], examples, info, step, total)
            if losses == [math.inf]:
                print(f"{one.adapter.id} has diverged at step {step + 1}", flush=True)
                break
        if losses != [math.inf]:
            kept.append(replace(one, done=max(one.done, first)))
    return kept


def run(options: argparse.Namespace) -> None:
    """Trains all adapters, evaluates them and saves the best. Raises WeftError if a
    call fails, and what `train` raises."""
    with Client(options.server, timeout=options.timeout) as client:
        info = adapters.server_info(client)
        first = argparse.Namespace(**{**vars(options), "seed": options.seed[0]})
        encode = sft.encoder(client, options, info, options.loss_on)
        examples = sft.load(first, encode.example)
        before = runs.check(options)
        members = open_runs(client, options, info, len(examples.train))
        runs.keep(options, info, before)
        per_step = options.batch * options.accumulate
        total = sft.num_steps(options, len(examples.train), per_step)
        print(f"{len(members)} adapters, {total} steps each", flush=True)
        begin = first_step(members, total)
        members = catch_up(members, examples.train, info, begin, total)
        settings = runs.settings(options)
        watch = Watch(
            options.output,
            total,
            options.log_format,
            done=begin,
            settings=settings,
            adapters=[one.adapter for one in members],
        )
        progress = Progress()
        with watch, deleted_on_error(members):
            try:
                steps = range(begin, total)
                train(members, examples, info, options, steps, watch, progress)
            finally:
                title = f"{options.adapter}: loss per learnt token"
                draw(progress.results, watch, options.output / "plot.png", title)
                show([*progress.results, *progress.diverged], options.output)
