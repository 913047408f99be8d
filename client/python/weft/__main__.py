"""`python -m weft`: train adapters, sample from them, make token ids of texts."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from weft import data
from weft.client import Client
from weft.errors import InvalidArgument, WeftError
from weft.openai_front import command as openai
from weft.recipes import grpo, sft
from weft.types import SampleOptions


def _tokenizer(client: Client, options: argparse.Namespace) -> data.ModelTokenizer:
    """Returns the tokenizer of --model-dir, or else of the server."""
    own = None
    if options.model_dir:
        own = data.ModelTokenizer.from_folder(options.model_dir)
    return client.tokenizer(own)


def _tokenize(options: argparse.Namespace) -> None:
    if options.model_dir:  # Needs no server.
        tokenizer = data.ModelTokenizer.from_folder(options.model_dir)
    else:
        with Client(options.server) as client:
            tokenizer = client.tokenizer()
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


def _sample(options: argparse.Namespace) -> None:
    settings: SampleOptions = {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
    }
    with Client(options.server) as client:
        tokenizer = _tokenizer(client, options)
        prompt = options.prompt
        if options.chat:
            prompt = tokenizer.chat_prompt([{"role": "user", "content": prompt}])
        if options.adapter:
            adapter = client.adapter(options.adapter)
            stream = adapter.sample_stream(prompt, **settings)
        else:
            stream = client.sample_stream(prompt, **settings)
        tokens: list[int] = []
        shown = ""
        for delta in stream:
            tokens += delta.tokens
            decoded = tokenizer.decode(tokens)
            # The last character may still lack some of its bytes.
            if decoded.startswith(shown) and not decoded.endswith("\ufffd"):
                print(decoded[len(shown) :], end="", flush=True)
                shown = decoded
        print(tokenizer.decode(tokens)[len(shown) :])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="weft", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, recipe in (("sft", sft), ("grpo", grpo)):
        command = commands.add_parser(
            name,
            help=recipe.SUMMARY,
            description=recipe.SUMMARY,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        recipe.add_arguments(command)
        command.set_defaults(run=recipe.run)

    front = commands.add_parser(
        "openai",
        help=openai.SUMMARY,
        description=openai.SUMMARY,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    openai.add_arguments(front)
    front.set_defaults(run=openai.run)

    summary = "Continue a text, or answer it."
    sample = commands.add_parser("sample", help=summary, description=summary)
    sample.set_defaults(run=_sample)
    sample.add_argument("--prompt", required=True)
    sample.add_argument("--chat", action="store_true", help="a user's message")
    sample.add_argument("--adapter", default="", help="default: base model")
    sample.add_argument("--max-tokens", type=int, default=64)
    sample.add_argument("--temperature", type=float, default=1.0)
    sample.add_argument("--seed", type=int)
    summary = "Records of text (JSONL, Parquet) to token ids (JSONL)."
    tokenize = commands.add_parser("tokenize", help=summary, description=summary)
    tokenize.set_defaults(run=_tokenize)
    tokenize.add_argument("--input", default="-", help="- = standard input")
    tokenize.add_argument("--output", default="-", help="- = standard output")
    tokenize.add_argument(
        "--no-eos",
        action="store_true",
        help="add no end-of-sequence token after each record",
    )
    server = os.environ.get("WEFT_SERVER", "127.0.0.1:50051")
    for command in (front, sample, tokenize):
        command.add_argument("--server", default=server, help="or WEFT_SERVER")
        command.add_argument(
            "--model-dir", help="folder with tokenizer.json; default: the server's"
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line. Returns 0 for success, 1 for failure and 130 for Ctrl-C.
    For wrong usage argparse exits with 2."""
    logging.basicConfig(format="weft: %(message)s")
    options = _parser().parse_args(argv)
    try:
        options.run(options)
    except (WeftError, OSError) as error:
        print(f"weft: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("weft: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
