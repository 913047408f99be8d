"""The command `openai` of `python -m weft`."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from weft.channel import Security
from weft.data import ModelTokenizer
from weft.errors import InvalidArgument

SUMMARY = "Serve OpenAI's API: completions and chats of adapters, by name."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-dir", required=True, help="folder with tokenizer.json")
    parser.add_argument("--listen", default="127.0.0.1:8000", help="HOST:PORT")
    parser.add_argument(
        "--token-file",
        type=Path,
        help="the token for the server, whatever keys callers have (default: a "
        "caller's key, if it is a token)",
    )
    parser.add_argument(
        "--max-body-bytes", type=int, default=4 << 20, help="of a request"
    )


def run(options: argparse.Namespace) -> None:
    """Serves until SIGINT or SIGTERM. Raises InvalidArgument if the packages are
    missing, or if other machines could use the token of --token-file."""
    try:
        import uvicorn

        from weft.openai_front.app import Front, make_app
    except ImportError as error:
        raise InvalidArgument(
            f"the front needs the package {error.name}: pip install fastapi uvicorn"
        ) from None
    host, _, port = options.listen.rpartition(":")
    if not port.isdecimal():
        raise InvalidArgument(f"--listen is {options.listen!r}, must be HOST:PORT")
    # Each caller brings its own token, unless the operator gives a --token-file.
    security = dataclasses.replace(Security.from_environment(), token=None)
    if options.token_file is not None:
        if host not in ("127.0.0.1", "::1", "[::1]", "localhost"):
            raise InvalidArgument(
                f"--listen is {options.listen}: with --token-file it must be on "
                "loopback, because callers need no key"
            )
        token = options.token_file.read_text("utf-8").strip()
        security = dataclasses.replace(security, token=token)
    tokenizer = ModelTokenizer.from_folder(options.model_dir)
    app = make_app(Front(options.server, tokenizer, security), options.max_body_bytes)
    uvicorn.run(app, host=host.strip("[]"), port=int(port), log_level="warning")
