"""`python -m weft`: tokenize, train and sample with text."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import cycle, islice

from weft import text
from weft.client import Adapter, Client
from weft.errors import InvalidArgument, NotFound, WeftError
from weft.types import Datum, SampleOptions


def _tokenize(options: argparse.Namespace) -> None:
    tokenizer = text.load_tokenizer(options.model_dir)
    with ExitStack() as files:
        source, target = sys.stdin, sys.stdout
        if options.input != "-":
            source = files.enter_context(open(options.input, encoding="utf-8"))
        if options.output != "-":
            target = files.enter_context(open(options.output, "w", encoding="utf-8"))
        for record in text.read_records(source, options.input):
            json.dump(text.tokenize_record(record, tokenizer), target)
            target.write("\n")


def _open_or_create(client: Client, options: argparse.Namespace) -> Adapter:
    try:
        return client.adapter(options.adapter)
    except NotFound:
        return client.create_adapter(
            options.adapter, rank=options.rank, tenant=options.tenant
        )


def _num_scored(datum: Datum) -> int:
    if datum.weights is None:
        return int(datum.targets.size)
    return int((datum.weights != 0).sum())


def _train(options: argparse.Namespace) -> None:
    tokenizer = text.load_tokenizer(options.model_dir)
    with open(options.data, encoding="utf-8") as file:
        data = [
            text.record_datum(text.tokenize_record(record, tokenizer))
            for record in text.read_records(file, options.data)
        ]
    if not data:
        raise InvalidArgument(f"{options.data}: no data")
    stream = cycle(data)
    with Client(options.server) as client:
        adapter = _open_or_create(client, options)
        for step in range(1, options.steps + 1):
            batch = list(islice(stream, options.batch))
            gradient = adapter.submit.forward_backward(batch)
            update = adapter.submit.optim_step(learning_rate=options.lr)
            loss = gradient.result().metrics["loss:sum"]
            norm = update.result().grad_norm
            mean = loss / max(sum(map(_num_scored, batch)), 1)
            print(
                f"step {step}/{options.steps} loss {mean:.4f} grad {norm:.3g}",
                flush=True,
            )


def _sample(options: argparse.Namespace) -> None:
    tokenizer = text.load_tokenizer(options.model_dir)
    prompt = tokenizer.encode(options.prompt).ids
    settings: SampleOptions = {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
    }
    with Client(options.server) as client:
        if options.adapter:
            adapter = client.adapter(options.adapter)
            stream = adapter.sample_stream(prompt, **settings)
        else:
            stream = client.sample_stream(prompt, **settings)
        tokens: list[int] = []
        shown = ""
        for delta in stream:
            tokens += delta.tokens
            decoded: str = tokenizer.decode(tokens)
            # A character may still lack its last bytes.
            if decoded.startswith(shown) and not decoded.endswith("\ufffd"):
                print(decoded[len(shown) :], end="", flush=True)
                shown = decoded
        print(tokenizer.decode(tokens)[len(shown) :])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="weft", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    server = os.environ.get("WEFT_SERVER", "127.0.0.1:50051")

    def add(
        name: str, run: Callable[[argparse.Namespace], None], summary: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=summary)
        command.set_defaults(run=run)
        command.add_argument(
            "--model-dir", required=True, help="folder with tokenizer.json"
        )
        return command

    tokenize = add("tokenize", _tokenize, "Texts (JSONL) to token ids (JSONL).")
    tokenize.add_argument("--input", default="-", help="- = standard input")
    tokenize.add_argument("--output", default="-", help="- = standard output")

    train = add("train", _train, "Train an adapter on texts (JSONL).")
    train.add_argument("--data", required=True, help="texts or token ids")
    train.add_argument("--adapter", required=True, help="made if it is new")
    train.add_argument("--steps", type=int, default=10)
    train.add_argument("--batch", type=int, default=8)
    train.add_argument("--lr", type=float, default=1e-4)
    train.add_argument("--rank", type=int, default=32, help="of a new adapter")
    train.add_argument("--tenant", help="of a new adapter; one of its own")

    sample = add("sample", _sample, "Continue a text.")
    sample.add_argument("--prompt", required=True)
    sample.add_argument("--adapter", default="", help="default: base model")
    sample.add_argument("--max-tokens", type=int, default=64)
    sample.add_argument("--temperature", type=float, default=1.0)
    sample.add_argument("--seed", type=int)

    for command in (train, sample):
        command.add_argument("--server", default=server, help="or WEFT_SERVER")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line: 0 done, 1 failed, 2 (argparse) wrong usage."""
    options = _parser().parse_args(argv)
    try:
        options.run(options)
    except (WeftError, OSError) as error:
        print(f"weft: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
