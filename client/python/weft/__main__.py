"""`python -m weft`: train adapters, chat with them, export them."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from weft import chat, data
from weft.client import Client
from weft.errors import InvalidArgument, Unavailable, WeftError
from weft.openai_front import command as openai
from weft.recipes import adapters, dpo, grpo, sft, sweep
from weft.routing import split_model


def _tokenize(options: argparse.Namespace) -> None:
    if options.model_dir:  # Needs no server.
        tokenizer = adapters.folder_tokenizer(options)
    else:
        with Client(options.server) as client:
            tokenizer = adapters.tokenizer(client, options)
    encoder = data.Encoder(tokenizer, loss_on="last", eos=not options.no_eos)

    def encode(record: data.Record) -> dict[str, object]:
        example = encoder.example(record)
        return {"tokens": example.tokens, "prompt_length": example.prompt_length}

    source = "/dev/stdin" if options.input == "-" else options.input
    dataset = data.Dataset(source, encode)
    with ExitStack() as files:
        target = sys.stdout
        if options.output != "-":
            target = files.enter_context(open(options.output, "w", encoding="utf-8"))
        for record in dataset:
            json.dump(record, target)
            target.write("\n")
    if dataset.num_bad:
        raise InvalidArgument(f"{options.input}: {dataset.num_bad} records left out")


def _export(options: argparse.Namespace) -> None:
    name, snapshot = split_model(options.adapter)
    with Client(options.server) as client:
        adapter = client.adapter(name)
        adapters.export(client, adapter, options.output, options, snapshot)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except of options that are off."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False):
            return action.help
        return super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="weft", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(
        name: str,
        summary: str,
        run: Callable[[argparse.Namespace], None],
        formatter: type[argparse.HelpFormatter] = argparse.HelpFormatter,
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=summary, description=summary, formatter_class=formatter
        )
        command.set_defaults(run=run)
        return command

    recipes = {"sft": sft, "dpo": dpo, "grpo": grpo, "sweep": sweep}
    for name, recipe in recipes.items():
        recipe.add_arguments(add(name, recipe.SUMMARY, recipe.run, _Help))
    front = add("openai", openai.SUMMARY, openai.run, _Help)
    openai.add_arguments(front)
    front.add_argument("--model-dir", help=adapters.MODEL_DIR)
    sample = add("sample", "Continue a text, or answer it.", chat.sample)
    chat.add_arguments(sample, max_tokens=64)
    sample.add_argument("--prompt", required=True)
    sample.add_argument("--chat", action="store_true", help="a user's message")
    talk = add("chat", chat.SUMMARY, chat.run)
    chat.add_chat_arguments(talk)
    summary = "Write an adapter as a PEFT folder that other programs load."
    export = add("export", summary, _export)
    adapters.add_folder_arguments(export)
    export.add_argument("--adapter", required=True, help="or ADAPTER@SNAPSHOT")
    export.add_argument(
        "--output", type=adapters.export_folder, required=True, help="the folder"
    )
    adapters.add_export_arguments(export)
    summary = "Records of text (JSONL, Parquet) to token ids (JSONL)."
    tokenize = add("tokenize", summary, _tokenize)
    adapters.add_model_arguments(tokenize)
    tokenize.add_argument("--input", default="-", help="- = standard input")
    tokenize.add_argument("--output", default="-", help="- = standard output")
    no_eos = "add no end-of-sequence token after each record"
    tokenize.add_argument("--no-eos", action="store_true", help=no_eos)
    server = os.environ.get("WEFT_SERVER", "127.0.0.1:50051")
    for command in (front, sample, talk, export, tokenize):
        command.add_argument("--server", default=server, help="or WEFT_SERVER")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line. Returns 0 for success, 1 for failure, 130 for Ctrl-C and 141
    if nobody reads the output. For wrong usage argparse exits with 2."""
    logging.basicConfig(format="weft: %(message)s")
    options = _parser().parse_args(argv)
    try:
        options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # As after `| head -1`. Python's end would flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (WeftError, OSError) as error:
        print(f"weft: {error}", file=sys.stderr)
        if isinstance(error, Unavailable) and hasattr(options, "save_every"):
            print("weft: the same command with --resume goes on", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("weft: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
