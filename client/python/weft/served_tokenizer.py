"""The server's tokenizer, which the client keeps in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from weft import methods
from weft._proto import server_pb2
from weft.convert import to_server_info
from weft.data.encode import Encoder
from weft.data.sources import Record
from weft.data.tokenizer import ModelTokenizer
from weft.datum import Datum
from weft.errors import DataLoss, InvalidArgument, NotFound, Unavailable
from weft.operations import Caller, Operation, Sleep
from weft.types import ModelInfo, ServerInfo, StrPath

# The files of ServerService.GetTokenizer, in its order.
_NAMES = (
    "added_tokens.json",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
_MAX_FILE_BYTES = 256 << 20


def _fingerprint(files: Mapping[str, bytes | bytearray]) -> str:
    """Returns ModelInfo.tokenizer_fingerprint of these files."""
    digest = hashlib.sha256()
    for name in _NAMES:
        if name in files:
            digest.update(f"{name}\0{len(files[name])}\0".encode())
            digest.update(files[name])
    return digest.hexdigest()


@contextlib.contextmanager
def _cache() -> Iterator[Path]:
    """Yields the user's folder of tokenizers; a temporary one if it cannot be
    written."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    place = Path(home, "weft", "tokenizers")
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
    if os.access(place, os.W_OK):
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="weft-") as scratch:
        yield Path(scratch)


def started_info(caller: Caller) -> Operation[ServerInfo]:
    """Builds the info of a server that has its model. Waits while it loads it."""
    deadline = time.monotonic() + caller.timeout
    while True:
        reply = yield from caller.call(methods.GET_INFO, server_pb2.GetInfoRequest())
        if reply.message.info.model.vocab_size:
            return to_server_info(reply.message.info)
        if time.monotonic() > deadline:
            raise Unavailable("the server is starting")
        yield Sleep(0.5)


class ServedTokenizer:
    """The tokenizer of a server with this model, in the cache or on its way.

    It is a context manager, because the folder may be a temporary one. Raises NotFound
    if the server has no tokenizer.
    """

    def __init__(self, model: ModelInfo) -> None:
        if not model.tokenizer_fingerprint:
            raise NotFound(
                f"the folder of the server's model {model.name!r} has no "
                "tokenizer.json: use that of a folder on your machine "
                "(weft.data.ModelTokenizer.from_folder, or --model-dir)"
            )
        # It becomes a part of a path.
        if not re.fullmatch("[0-9a-f]{64}", model.tokenizer_fingerprint):
            raise DataLoss(
                "the server sent a tokenizer_fingerprint that is not a SHA-256"
            )
        self._model = model
        self._received: dict[str, bytearray] = {}
        self._context = _cache()

    def __enter__(self) -> ServedTokenizer:
        self.folder = self._context.__enter__() / self._model.tokenizer_fingerprint
        return self

    def __exit__(self, *_: object) -> None:
        self._context.__exit__(None, None, None)

    def is_cached(self) -> bool:
        """Returns whether the folder has the files that the server has."""
        paths = {name: self.folder / name for name in _NAMES}
        found = {n: path.read_bytes() for n, path in paths.items() if path.is_file()}
        return _fingerprint(found) == self._model.tokenizer_fingerprint

    def add(self, chunk: server_pb2.TokenizerChunk) -> None:
        """Adds the next bytes of a file. Raises DataLoss for what no server has."""
        received = self._received.setdefault(chunk.name, bytearray())
        received += chunk.data
        if chunk.name not in _NAMES or len(received) > _MAX_FILE_BYTES:
            raise DataLoss(
                f"the server sent {len(received)} bytes of a file {chunk.name[:64]!r}, "
                f"must be at most {_MAX_FILE_BYTES} of a tokenizer's files"
            )

    def keep(self) -> None:
        """Writes the received files to the cache. Raises DataLoss if they are not the
        server's."""
        if _fingerprint(self._received) != self._model.tokenizer_fingerprint:
            raise DataLoss("the tokenizer's files do not have the server's fingerprint")
        self.folder.mkdir(exist_ok=True)
        for name in _NAMES:
            (self.folder / name).unlink(missing_ok=True)
            if name in self._received:
                # Another process may write or read the same file.
                part = self.folder / f"{name}.{os.getpid()}"
                part.parent.mkdir(exist_ok=True)
                part.write_bytes(self._received[name])
                part.replace(self.folder / name)

    def read(
        self,
        chat_template: StrPath | None,
        chat_template_kwargs: Mapping[str, object] | None,
    ) -> ModelTokenizer:
        """Returns the tokenizer of the folder, with all ends of sequence that the
        server knows."""
        tokenizer = ModelTokenizer.from_folder(
            self.folder,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        others = [
            token
            for token in self._model.eos_token_ids
            if token not in tokenizer.eos_ids
        ]
        tokenizer.eos_ids += tuple(others)
        tokenizer.vocab_size = self._model.vocab_size
        return tokenizer


def check_fits(
    own: ModelTokenizer, served: ModelTokenizer | None, model: ModelInfo
) -> None:
    """Raises InvalidArgument if token ids of `own` mean other tokens on a server with
    this model. served: the server's tokenizer, if it has one."""
    if not isinstance(own, ModelTokenizer):
        raise InvalidArgument(
            f"own is {own!r}, must be a tokenizer, such as that of "
            "weft.data.ModelTokenizer.from_folder(folder)"
        )
    ids = own.vocabulary()
    remedy = (
        "use the tokenizer of the server's model: client.tokenizer(), or leave out "
        "--model-dir"
    )
    number, token = max((number, token) for token, number in ids.items())
    if number >= model.vocab_size:
        raise InvalidArgument(
            f"the tokenizer gives {token!r} the id {number}, but ids of the server's "
            f"model {model.name!r} lie in [0, {model.vocab_size}); {remedy}"
        )
    known = {} if served is None else served.vocabulary()
    others = [(n, token) for token, n in known.items() if ids.get(token) != n]
    if others:
        number, token = min(others)
        has = (
            f"gives {token!r} the id {ids[token]}" if token in ids else f"no {token!r}"
        )
        raise InvalidArgument(
            f"the tokenizer has {len(ids)} tokens and {has}, but that of the server's "
            f"model {model.name!r} has {len(known)} and gives it {number}; {remedy}"
        )
    own.vocab_size = model.vocab_size


def make_datum(tokenizer: ModelTokenizer, record: Record | str, weight: float) -> Datum:
    """Returns the training data of a record of `Encoder`, or of a text."""
    encoder = Encoder(tokenizer, eos=bool(tokenizer.eos_ids))
    if isinstance(record, str):
        record = {"text": record}
    if not isinstance(record, Mapping):
        raise InvalidArgument(
            f"record is a {type(record).__name__}, must be a text or a record such as "
            '{"prompt": ..., "completion": ...}'
        )
    return encoder.example(record).datum(weight)
