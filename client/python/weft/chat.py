"""`python -m weft sample` and `python -m weft chat`: texts in, texts out."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterable, Sequence

from weft.client import Client
from weft.data import Message, ModelTokenizer
from weft.errors import WeftError
from weft.openai_front.text import Decoder
from weft.recipes import adapters
from weft.routing import split_model
from weft.types import SampleDelta, SampleOptions

ENDS = ("/quit", "/bye", "/exit", "exit")
SUMMARY = "Chat with an adapter or the base model."
HELP = (
    "Ctrl-D ends, as /quit does, Ctrl-C stops an answer. /clear forgets the chat, "
    "/retry asks for another answer."
)


def add_arguments(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Adds the options of a command that samples. max_tokens: its default."""
    adapters.add_model_arguments(parser)
    add = parser.add_argument
    add("--adapter", default="", help="or ADAPTER@SNAPSHOT; default: base model")
    add("--max-tokens", type=adapters.at_least(1), default=max_tokens)
    add("--temperature", type=adapters.number(0), default=1.0)
    add("--seed", type=adapters.at_least(0))


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m weft chat`."""
    add_arguments(parser, max_tokens=512)
    parser.add_argument("--system", help="the chat's first message")


class Speaker:
    """Samples from the model of the options, and prints the text as it is drawn."""

    def __init__(
        self, client: Client, tokenizer: ModelTokenizer, options: argparse.Namespace
    ) -> None:
        self._tokenizer = tokenizer
        self._settings: SampleOptions = {
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "seed": options.seed,
        }
        name, self._snapshot = split_model(options.adapter)
        self._client = client
        self._adapter = client.adapter(name) if name else None

    def say(self, prompt: Sequence[int], attempt: int = 0) -> str:
        """Prints the text that follows the prompt, and returns it. attempt: each one
        has its own seed."""
        settings = self._settings
        seed = settings["seed"]
        if seed is not None:
            settings = {**settings, "seed": seed + attempt}
        if self._adapter is None:
            return self._show(self._client.sample_stream(prompt, **settings))
        return self._show(
            self._adapter.sample_stream(prompt, snapshot=self._snapshot, **settings)
        )

    def _show(self, stream: Iterable[SampleDelta]) -> str:
        decoder = Decoder(self._tokenizer)
        whole = ""
        for token in (token for delta in stream for token in delta.tokens):
            text = decoder.add(token)
            print(text, end="", flush=True)
            whole += text
        rest = decoder.finish()
        print(rest, flush=True)
        return whole + rest


def sample(options: argparse.Namespace) -> None:
    """Continues a text, or answers it."""
    with Client(options.server) as client:
        tokenizer = adapters.tokenizer(client, options)
        if options.chat:
            question: Message = {"role": "user", "content": options.prompt}
            prompt = tokenizer.chat_prompt([question])
        else:
            prompt = tokenizer.encode(options.prompt)
        Speaker(client, tokenizer, options).say(prompt)


def run(options: argparse.Namespace) -> None:
    """Reads the user's messages from standard input, and answers each. A turn that
    fails, or that Ctrl-C stops, is left out of the chat."""
    start: list[Message] = []
    if options.system:
        start.append({"role": "system", "content": options.system})
    if importlib.util.find_spec("readline"):
        importlib.import_module("readline")  # Gives `input` keys to edit and to repeat.
    with Client(options.server) as client:
        tokenizer = adapters.tokenizer(client, options)
        speaker = Speaker(client, tokenizer, options)
        print(HELP)
        messages = list(start)
        attempt = 0
        while (text := _read()) is not None and text not in ENDS:
            command = text.partition(" ")[0]
            if text == "/clear":
                messages = list(start)
                continue
            if text == "/retry":
                if messages[-1:] == start[-1:]:
                    print("there is no answer yet")
                    continue
                asked = messages[:-1]
                attempt += 1
            elif text.startswith("/") and command[1:].isalpha():
                print(HELP if command == "/help" else f"{text} is no command. {HELP}")
                continue
            elif text:
                asked = [*messages, {"role": "user", "content": text}]
                attempt = 0
            else:
                continue
            try:
                answer = speaker.say(tokenizer.chat_prompt(asked), attempt)
            except (WeftError, KeyboardInterrupt) as error:
                print(
                    f"\nweft: {str(error) or 'stopped'}; the chat is as it was before"
                )
                continue
            messages = [*asked, {"role": "assistant", "content": answer}]


def _read() -> str | None:
    """Returns the user's next line; None at the end of the input."""
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None
