"""The command `openai` of `python -m weft`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import logging
from pathlib import Path

from weft.channel import Security, read_token
from weft.data import ModelTokenizer
from weft.errors import InvalidArgument

SUMMARY = "Serve OpenAI's API: completions and chats of adapters, by name."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--listen", default="127.0.0.1:8000", help="HOST:PORT")
    parser.add_argument(
        "--token-file",
        type=Path,
        help="the token for the server, whatever keys callers have (default: a "
        "caller's key, if it is a token)",
    )
    parser.add_argument(
        "--tinker",
        metavar="HOST:PORT",
        help="the server's --tinker-listen: the base model has also its names, and "
        "/v1/models lists tinker:// paths",
    )
    parser.add_argument(
        "--max-body-bytes", type=int, default=4 << 20, help="of a request"
    )
    parser.add_argument(
        "--allowed-hosts",
        metavar="NAME,...",
        type=_names,
        default=[],
        help="names of this machine that requests may have as Host, beside localhost "
        "and IP addresses",
    )
    parser.add_argument(
        "--allow-origin",
        metavar="ORIGIN,...",
        type=_names,
        default=[],
        help="origins, such as https://chat.example.org, whose pages may send requests",
    )


def _names(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip().lower())]


def _check_names(options: argparse.Namespace) -> None:
    from weft.openai_front.hosts import is_host_name, is_origin

    for name in options.allowed_hosts:
        if not is_host_name(name):
            raise InvalidArgument(
                f"--allowed-hosts has {name!r}, must be names without scheme and port"
            )
    for origin in options.allow_origin:
        if not is_origin(origin):
            raise InvalidArgument(
                f"--allow-origin has {origin!r}, must be http://HOST or https://HOST, "
                "with a port if the page has one"
            )


def run(options: argparse.Namespace) -> None:
    """Serves until SIGINT or SIGTERM. Raises InvalidArgument if the packages are
    missing, or if other machines could use the token of --token-file."""
    try:
        from weft.openai_front.app import Front, make_app
        from weft.openai_front.log import Log
        from weft.openai_front.server import Server, config
        from weft.openai_front.tinker import TinkerPort
    except ImportError as error:
        raise InvalidArgument(
            f"the front needs the package {error.name}: pip install fastapi httpx "
            "uvicorn"
        ) from None
    host, _, port = options.listen.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidArgument(f"--listen is {options.listen!r}, must be HOST:PORT")
    _check_names(options)
    # Each caller brings its own token, unless the operator gives a --token-file.
    security = dataclasses.replace(Security.from_environment(), token=None)
    if options.token_file is not None:
        if host not in ("127.0.0.1", "::1", "[::1]", "localhost"):
            raise InvalidArgument(
                f"--listen is {options.listen}: with --token-file it must be on "
                "loopback, because callers need no key"
            )
        token = read_token(options.token_file)
        security = dataclasses.replace(security, token=token)
    own = None
    if options.model_dir:
        own = ModelTokenizer.from_folder(options.model_dir)
    tinker = TinkerPort(options.tinker) if options.tinker else None
    app = make_app(
        Front(options.server, own, security, tinker),
        options.max_body_bytes,
        options.allowed_hosts,
        options.allow_origin,
    )
    logging.basicConfig(handlers=[Log()], force=True)
    # All callers wait while a body is parsed. With Python's thresholds the collector
    # makes that three times as long: 2 s for 4 MiB of small lists.
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
    with contextlib.suppress(KeyboardInterrupt):
        Server(config(app, host.strip("[]"), int(port)), options.server).run()
