"""Creates, finds, resumes, updates and saves the adapter that a run trains."""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weft import peft_extras
from weft.adapter import Adapter
from weft.client import Client
from weft.convert import LOADERS
from weft.data import ModelTokenizer
from weft.data.tokenizer import template_text
from weft.datum import Datum
from weft.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    WeftError,
)
from weft.folders import check_folder
from weft.recipes import runs
from weft.recipes.batches import requests
from weft.recipes.schedule import SCHEDULES, learning_rate
from weft.recipes.watch import FORMATS
from weft.served_tokenizer import ServedTokenizer
from weft.types import (
    AdapterInfo,
    CheckpointInfo,
    FloatArray,
    LoraConfig,
    LossOptions,
    OptimOptions,
    OptimResult,
    ServerInfo,
    TrainResult,
)

MODEL_DIR = "folder with tokenizer.json; default: the server's"
BASE_MODEL = (
    "the export's base model, a name of the Hub or a folder; default: --model-dir if "
    "it is a whole model, otherwise the server's name for it"
)
INIT = (
    "the weights with which a new adapter starts, by default those of the last "
    "checkpoint; dpo and --kl-coef then compare with them, not with the base model"
)
# The snapshot of the weights of --init. A user would not give it this name.
START = "weft-init"
# An adapter whose last step is not older may have another client.
RECENT_SECONDS = 60.0
RANK = 16
ALPHA = 32.0
SEED = "order of the data, draws, new weights"


def at_least(least: int) -> Callable[[str], int]:
    """Returns a parser of arguments that are whole numbers, `least` or more."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(
                f"{text}: must be a whole number of at least {least}"
            )
        return value

    return parse


def number(least: float, below: float = math.inf) -> Callable[[str], float]:
    """Returns a parser of arguments that are numbers in [least, below)."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value < below:
            limit = f" and less than {below:g}" if below < math.inf else ""
            raise argparse.ArgumentTypeError(
                f"{text}: must be a number of at least {least:g}{limit}"
            )
        return value

    return parse


RATE = number(0, 1000)


def export_folder(text: str) -> Path:
    """Parses an argument that is a folder to which an export will be written, perhaps
    hours later."""
    folder = Path(text)
    try:
        check_folder(folder)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(error.message) from error
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{folder}: {error.strerror}") from error
    return folder


def switches(text: str) -> dict[str, object]:
    """Parses an argument that is a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"{text}: must be a JSON object such as '{{\"enable_thinking\": false}}'"
        )
    return value


def add_folder_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name the files of the model's tokenizer."""
    add = parser.add_argument
    add("--model-dir", help=MODEL_DIR)
    add("--chat-template", metavar="FILE", help="replaces the tokenizer's own")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a command that needs the model's tokenizer."""
    add_folder_arguments(parser)
    parser.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        type=switches,
        help="the template's own switches, such as '{\"enable_thinking\": false}'",
    )


def folder_tokenizer(options: argparse.Namespace) -> ModelTokenizer:
    """Returns the tokenizer of --model-dir, with the template of the options."""
    return ModelTokenizer.from_folder(
        options.model_dir,
        chat_template=options.chat_template,
        chat_template_kwargs=options.chat_template_kwargs,
    )


def tokenizer(client: Client, options: argparse.Namespace) -> ModelTokenizer:
    """Returns the tokenizer of --model-dir, or else of the server, with the template of
    the options. Raises InvalidArgument if it does not fit the server's model."""
    if options.model_dir:
        return client.tokenizer(folder_tokenizer(options))
    return client.tokenizer(
        chat_template=options.chat_template,
        chat_template_kwargs=options.chat_template_kwargs,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a recipe that trains one adapter."""
    add_common_arguments(parser)
    add = parser.add_argument
    add("--adapter", required=True, help="its name on the server")
    rank = f"LoRA rank of a new adapter; default: that of --init, or {RANK}"
    add("--rank", type=at_least(1), help=rank)
    add("--lr", type=RATE, default=2e-4, help="learning rate at its highest")
    add("--seed", type=at_least(0), default=0, help=SEED)
    add("--init", metavar="ADAPTER[/CHECKPOINT]", help=INIT)
    add_course_arguments(parser)
    add("--export", type=export_folder, help="folder for the adapter in PEFT's form")
    add_export_arguments(parser)


def add_course_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a run's course."""
    add = parser.add_argument
    resume = "go on with what was trained before; otherwise it is refused"
    add("--resume", action="store_true", help=resume)
    every = "steps; 0: at start and end only"
    add("--eval-every", type=at_least(0), default=0, help=every)
    add("--save-every", type=at_least(0), default=0, help="steps; 0: at the end only")


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the files of an export depend on."""
    parser.add_argument("--base-model", help=BASE_MODEL)
    program = "the program that loads the export"
    parser.add_argument(
        "--for", dest="loader", choices=LOADERS, default="peft", help=program
    )


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of every recipe."""
    add = parser.add_argument
    server = os.environ.get("WEFT_SERVER", "127.0.0.1:50051")
    add("--server", default=server, help="HOST:PORT,... of servers; or WEFT_SERVER")
    add(
        "--timeout",
        type=number(0),
        default=3600.0,
        help="seconds of a call and its wait",
    )
    add_model_arguments(parser)
    owner = "owner of a new adapter; default: the token's, or else the name --adapter"
    add("--tenant", help=owner)
    alpha = "LoRA alpha of a new adapter, whose output counts alpha / rank times"
    add(
        "--alpha",
        type=number(0),
        help=f"{alpha}; default: that of --init, or {ALPHA:g}",
    )
    add("--schedule", choices=SCHEDULES, default="cosine")
    add("--warmup", type=at_least(0), default=0, help="steps until the rate is full")
    add("--weight-decay", type=number(0), default=0.0)
    add("--max-grad-norm", type=number(0), default=1.0, help="clips; 0: no clipping")
    add("--output", type=Path, help="folder of log and plot; default: run/ADAPTER")
    add("--log-format", choices=FORMATS, default="jsonl")


def export(
    client: Client,
    adapter: Adapter,
    folder: Path,
    options: argparse.Namespace,
    snapshot: str | None = None,
) -> None:
    """Writes a PEFT folder that other programs load alone, with the tokenizer's files
    of --model-dir, or else of the server, and the chat template of the options."""
    base_model, own = options.base_model, options.model_dir
    if base_model is None and own and Path(own, "config.json").is_file():
        base_model = str(Path(own).resolve())
    template = options.chat_template and template_text(options.chat_template)
    with tempfile.TemporaryDirectory(prefix="weft-") as scratch:
        files = Path(scratch)
        if own:
            peft_extras.copy_tokenizer(Path(own), files)
        else:
            _copy_served(client, files)
        if template:
            (files / peft_extras.TEMPLATE).write_text(template, encoding="utf-8")
        has_any = any(files.iterdir())
        adapter.export(
            folder,
            snapshot=snapshot,
            base_model=base_model,
            model_dir=files if has_any else None,
            loader=options.loader,
        )
    print(f"exported {adapter.id} to {folder}", flush=True)
    if getattr(options, "chat_template_kwargs", None):
        print("an export has no place for --chat-template-kwargs", flush=True)


def _copy_served(client: Client, folder: Path) -> None:
    """Copies the files of the server's tokenizer, if it has one."""
    model = server_info(client).model
    if not model.tokenizer_fingerprint:
        print("the export has no tokenizer, as the server has none: see --model-dir")
        return
    client.tokenizer()  # Gets the files.
    with ServedTokenizer(model) as served:
        if served.is_cached():
            peft_extras.copy_tokenizer(served.folder, folder)
        else:
            print("the export has no tokenizer, because no cache folder is writable")


def server_info(client: Client) -> ServerInfo:
    """Waits until the server has loaded its model, and returns the server's info.

    Raises Unavailable if the server cannot be reached.
    """
    info = client.info()
    if not client.healthy():
        print("waiting for the server to be ready", flush=True)
    while not client.healthy():
        time.sleep(0.5)
        info = client.info()
    return info if info.model.context_length else client.info()


def open_adapter(
    client: Client, options: argparse.Namespace, info: ServerInfo
) -> tuple[Adapter, int]:
    """Returns the adapter and the number of its optimizer steps, and writes run.json.

    With --init, a new adapter starts with the weights of that checkpoint, and keeps
    them as the snapshot START. With --resume, loads the adapter's last checkpoint if
    the server has lost the adapter. Raises FailedPrecondition for an adapter that was
    trained before, without --resume, and for one that does not have the --init or the
    shape of the options.
    """
    before = runs.check(options)
    adapter, optim_steps = take(client, options)
    runs.keep(options, info, before)
    return adapter, optim_steps


def take(client: Client, options: argparse.Namespace) -> tuple[Adapter, int]:
    """Does what open_adapter does, but for run.json."""
    saved = client.checkpoints(options.adapter) if options.resume else []
    last = max(saved, key=lambda checkpoint: checkpoint.optim_steps, default=None)
    adapter = _existing(client, options.adapter)
    state = None if adapter is None else adapter.info()
    _check_start(options, state)
    start = None
    if options.init and (state is None or not state.optim_steps):
        start = _start(client, options.init)
        options.init = f"{start.adapter_id}/{start.name}"
    shaped = state or last or start
    if shaped is not None:
        _take_shape(options, shaped.config)
    if adapter is None:
        adapter = make(client, options, last or start)
    if state is not None and state.next_step > 1:
        _settle(adapter, state)
    if start is not None:
        _load_start(adapter, start, is_new=state is None)
    if last is not None and (start or state is None or not state.last_step):
        adapter.load(last.name)
        adapter.zero_grad()
    state = adapter.info()
    if state.optim_steps:
        print(f"{adapter.id} goes on behind step {state.optim_steps}", flush=True)
    _take_shape(options, state.config)
    return adapter, state.optim_steps


def _settle(adapter: Adapter, before: AdapterInfo) -> None:
    """Waits until the server has made all steps of earlier runs, and drops a gradient
    that no optimizer step has used, so that it does not count twice. before: the
    adapter's state before that."""
    idle = time.time() - before.last_used_at
    if 0 <= idle < RECENT_SECONDS:
        print(
            f"{adapter.id}: its last step came {idle:.0f} s ago; if another client "
            "trains it, this run takes it over"
        )
    dropped = 0
    while True:
        try:
            dropped += adapter.zero_grad().accumulated_tokens
            # A step that had waited for a lost one may have run behind this one.
            if adapter.info().next_step == adapter.next_step:
                break
        except AlreadyExists:  # Another client has taken the number.
            pass
        adapter.resync()
    if adapter.next_step > before.next_step + 1:
        print(f"{adapter.id}: taken over from another client, which trained it")
    if dropped:
        print(f"{adapter.id}: dropped a gradient of {dropped} tokens without an update")


def _existing(client: Client, name: str) -> Adapter | None:
    try:
        return client.adapter(name)
    except NotFound:
        return None


def _check_start(options: argparse.Namespace, state: AdapterInfo | None) -> None:
    """Raises FailedPrecondition unless the run may begin, or go on, with an adapter in
    this state. state: None for a new one."""
    if state is None:
        return
    # A run with --init may have failed before its first step.
    began = START in state.snapshots
    if options.init and not began:
        raise FailedPrecondition(
            f"--init: adapter {state.adapter_id!r} exists and did not start so; give "
            "another name, or delete it (weftctl adapters delete)"
        )
    if state.optim_steps and not options.resume:
        raise FailedPrecondition(
            f"adapter {state.adapter_id!r} was trained before, {state.optim_steps} "
            "steps: give --resume to go on, or another name"
        )


def _take_shape(options: argparse.Namespace, config: LoraConfig) -> None:
    """Sets rank and alpha to the adapter's. Raises FailedPrecondition if the options
    name others."""
    for name in ("rank", "alpha"):
        asked, has = getattr(options, name), getattr(config, name)
        if asked is not None and not math.isclose(asked, has, rel_tol=1e-6):
            raise FailedPrecondition(
                f"--{name} {asked:g}: adapter {options.adapter!r} has {has:g}, by "
                f"itself, its checkpoint or --init; leave out --{name}"
            )
        setattr(options, name, has)


def _load_start(adapter: Adapter, start: CheckpointInfo, *, is_new: bool) -> None:
    """Loads the weights of --init and keeps them as START. Deletes a new adapter if
    that fails, because it would then look like one that starts with new weights."""
    try:
        if not is_new and START in adapter.info().snapshots:
            adapter.release_snapshot(
                START
            )  # Of a run that ended before its first step.
        adapter.load(start.name, source=start.adapter_id, weights_only=True)
        adapter.snapshot(START)
    except WeftError:
        if is_new:
            adapter.delete()
        raise
    print(f"{adapter.id} starts with {start.adapter_id}/{start.name}", flush=True)


def _start(client: Client, init: str) -> CheckpointInfo:
    """Returns the checkpoint that --init names. Raises InvalidArgument if there is
    none."""
    name, _, checkpoint = init.partition("/")
    saved = client.checkpoints(name)
    found = [one for one in saved if checkpoint in ("", one.name)]
    if not found:
        known = ", ".join(f"{name}/{one.name}" for one in saved) or "none"
        raise InvalidArgument(
            f"--init {init}: no such checkpoint; those of {name!r}: {known}"
        )
    return max(found, key=lambda one: one.optim_steps)


def reference(
    client: Client,
    adapter: Adapter,
    batch: Sequence[Datum],
    info: ServerInfo,
    temperature: float | None = None,
) -> list[FloatArray]:
    """Returns the log-probabilities of the data under the policy that a run starts
    with: the weights of --init, otherwise the base model. Does not train."""
    parts = list(requests(batch, info))
    if START in adapter.info().snapshots:
        answers = [
            adapter.score(part, snapshot=START, temperature=temperature)
            for part in parts
        ]
    else:
        pending = [
            client.submit.forward(part, temperature=temperature) for part in parts
        ]
        answers = [future.result() for future in pending]
    return [result.logprobs for answer in answers for result in answer.results]


def make(
    client: Client, options: argparse.Namespace, last: CheckpointInfo | None
) -> Adapter:
    """Makes a new adapter, on the modules of its last checkpoint if there is one."""
    return client.create_adapter(
        options.adapter,
        rank=options.rank or RANK,
        alpha=ALPHA if options.alpha is None else options.alpha,
        target_modules=None if last is None else last.config.target_modules,
        seed=options.seed,
        tenant=options.tenant,
    )


@dataclass(frozen=True)
class Update:
    """The result of one optimizer step."""

    loss: float  # The sum of the data's weighted losses.
    grad_norm: float  # The gradient's L2 norm before clipping.
    metrics: list[dict[str, float]]  # The metrics of each request.


@dataclass(frozen=True)
class Pending:
    """An optimizer step that is on its way, with the gradients that it uses."""

    gradients: Sequence[Future[TrainResult]]
    step: Future[OptimResult]

    def diverged(self) -> bool:
        """Waits for the step. Returns whether the server made none of it, because the
        gradient was not finite."""
        error = self.step.exception()
        return isinstance(error, FailedPrecondition) and error.step_done

    def result(self) -> Update:
        """Waits for the answers. Raises the first error."""
        metrics = [gradient.result().metrics for gradient in self.gradients]
        result = self.step.result()
        total = sum(values["loss:sum"] for values in metrics)
        return Update(total, result.grad_norm, metrics)


def submit_update(
    adapter: Adapter,
    batches: Sequence[Sequence[Datum]],
    info: ServerInfo,
    loss: str,
    loss_options: LossOptions,
    optim_options: OptimOptions,
) -> Pending:
    """Adds up the gradients of all batches, then makes an optimizer step.

    Sends all calls without waiting for an answer. The server keeps their order, because
    steps are numbered.
    """
    gradients = [
        adapter.submit.forward_backward(request, loss, **loss_options)
        for batch in batches
        for request in requests(batch, info)
    ]
    return Pending(gradients, adapter.submit.optim_step(**optim_options))


def optim_options(options: argparse.Namespace, step: int, total: int) -> OptimOptions:
    """Returns AdamW's settings for step `step` of `total`, counted from 0."""
    return {
        "learning_rate": learning_rate(
            step, total, options.lr, schedule=options.schedule, warmup=options.warmup
        ),
        "weight_decay": options.weight_decay,
        "max_grad_norm": options.max_grad_norm,
    }


def is_due(step: int, every: int, total: int) -> bool:
    """Returns whether an action is due after step `step`, counted from 1. The action is
    due every `every` steps (0: never) and after the last step."""
    return step == total or (every > 0 and step % every == 0)


def save_missing(client: Client, adapter: Adapter, step: int) -> None:
    """Writes the checkpoint step-N if a run ended before it wrote the checkpoint."""
    saved = {one.name: one.optim_steps for one in client.checkpoints(adapter.id)}
    if saved.get(f"step-{step}") != adapter.info().optim_steps:
        save(adapter, step)


@contextmanager
def saved_on_error(adapter: Adapter, step: int) -> Iterator[None]:
    """Writes the checkpoint step-N if the context raises. The context must hold no call
    that trains, so that the adapter is as it was behind step N."""
    try:
        yield
    except BaseException:
        if step:
            save(adapter, step)
        raise


def save(adapter: Adapter, step: int) -> None:
    """Writes the checkpoint step-N and replaces one that an earlier run left."""
    name = f"step-{step}"
    adapter.save(name, overwrite=True)
    print(f"saved {adapter.id}/{name}", flush=True)
