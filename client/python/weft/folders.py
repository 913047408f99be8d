"""Converts folders to and from the chunks of ExportAdapter and ImportAdapter, and of
DownloadCheckpoint and UploadCheckpoint."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from weft import peft_extras
from weft._proto import adapters_pb2
from weft.convert import durability_name
from weft.errors import DataLoss, InvalidArgument
from weft.methods import RequestT
from weft.types import StrPath

CHUNK_BYTES = 1 << 20
FILES = ("adapter_config.json", "adapter_model.safetensors")
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "trainer_state.json"
# A folder with one of these has a model.
MODEL_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json")
PREFIX = ".weft-export-"


class FileRequests(Iterable[RequestT]):
    """The messages that upload files: the first has `options`, the others the files,
    which are read while the call sends them. A call that goes on to another server
    begins anew."""

    def __init__(
        self,
        request_type: type[RequestT],
        options: adapters_pb2.ImportOptions | adapters_pb2.UploadOptions,
        paths: Sequence[Path],
    ) -> None:
        self.adapter_id = options.adapter_id
        self._request_type = request_type
        self._options = options
        self._paths = paths

    def __iter__(self) -> Iterator[RequestT]:
        yield self._request_type(options=self._options)
        for chunk in _chunks(self._paths):
            yield self._request_type(chunk=chunk)


def import_requests(
    adapter_id: str,
    folder: StrPath,
    tenant: str | None = None,
    durability: str | None = None,
) -> FileRequests[adapters_pb2.ImportAdapterRequest]:
    """Returns the messages of an import.

    Raises InvalidArgument if the folder lacks one of PEFT's two files, or for an
    unknown durability.
    """
    paths = _paths(folder, FILES)
    options = adapters_pb2.ImportOptions(
        adapter_id=adapter_id,
        tenant=tenant or "",
        durability=durability_name(durability),
    )
    return FileRequests(adapters_pb2.ImportAdapterRequest, options, paths)


def upload_requests(
    adapter_id: str,
    name: str,
    folder: StrPath,
    overwrite: bool = False,
    tenant: str | None = None,
) -> FileRequests[adapters_pb2.UploadCheckpointRequest]:
    """Returns the messages of an upload.

    Raises InvalidArgument if the folder lacks a file that every checkpoint has.
    """
    paths = _paths(folder, (*FILES, STATE_FILE))
    optimizer = Path(folder, OPTIMIZER_FILE)
    if optimizer.is_file():
        paths.append(optimizer)
    options = adapters_pb2.UploadOptions(
        adapter_id=adapter_id, name=name, overwrite=overwrite, tenant=tenant or ""
    )
    return FileRequests(adapters_pb2.UploadCheckpointRequest, options, paths)


def _paths(folder: StrPath, names: Iterable[str]) -> list[Path]:
    paths = [Path(folder, name) for name in names]
    for path in paths:
        if not path.is_file():
            why = ""
            if path.suffix == ".safetensors" and path.with_suffix(".bin").is_file():
                why = (
                    f"; {path.stem}.bin is not read, because a pickle can run code: "
                    "save the adapter again with safe_serialization=True"
                )
            raise InvalidArgument(f"no {path.name} in {folder}{why}")
    return paths


def _chunks(paths: Iterable[Path]) -> Iterator[adapters_pb2.FileChunk]:
    for path in paths:
        with path.open("rb") as file:
            # An empty file is one empty chunk, so that the server gets its name.
            data = file.read(CHUNK_BYTES)
            yield adapters_pb2.FileChunk(name=path.name, data=data)
            while data := file.read(CHUNK_BYTES):
                yield adapters_pb2.FileChunk(name=path.name, data=data)


def check_folder(folder: Path) -> None:
    """Raises InvalidArgument if the folder holds a model, whose tokenizer an export
    would replace, and OSError if nothing can be written to it."""
    model = next((one for one in MODEL_FILES if (folder / one).is_file()), None)
    if model is not None:
        raise InvalidArgument(f"{folder} holds a model ({model}): name another folder")
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"{folder} is a file: name a folder")
    # The files are written beside the folder, and then moved into it.
    parents = folder.absolute().parents
    above = next((one for one in parents if one.is_dir()), folder)
    for place in {above, folder if folder.is_dir() else above}:
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=place):
            pass


class FolderWriter:
    """Writes exported chunks to files beside `folder`. `commit` moves the files
    into `folder`.

    It is a context manager. Without `commit` its exit removes the written files, so
    that a failed export does not change the folder. Not thread-safe.
    """

    def __init__(self, folder: StrPath) -> None:
        self._folder = Path(folder)
        check_folder(self._folder)
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = tempfile.TemporaryDirectory(
            prefix=PREFIX, dir=self._folder.parent
        )
        self._name = ""
        self._file: BinaryIO | None = None

    def __enter__(self) -> FolderWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self._scratch.cleanup()

    def add(self, chunk: adapters_pb2.FileChunk) -> None:
        """Appends a chunk. Raises DataLoss if its name is not a plain file name."""
        if chunk.name != self._name:
            if chunk.name in ("", "..") or Path(chunk.name).name != chunk.name:
                raise DataLoss(f"the server sent the file name {chunk.name!r}")
            self._close()
            self._name = chunk.name
            path = Path(self._scratch.name, chunk.name)
            self._file = path.open("wb")
        assert self._file is not None
        self._file.write(chunk.data)

    def commit(
        self,
        base_model: str | None = None,
        model_dir: StrPath | None = None,
        loader: str = "peft",
    ) -> None:
        """Moves the files into the folder and replaces files with the same names, but
        no README.md that Weft did not write.

        base_model, model_dir, loader: see peft_extras.add. Raises DataLoss if the
        chunks lack one of PEFT's two files, and InvalidArgument as peft_extras.add
        does.
        """
        self._close()
        scratch = Path(self._scratch.name)
        if not {path.name for path in scratch.iterdir()} >= set(FILES):
            raise DataLoss("the server's export ended before its last file")
        if base_model is not None or model_dir is not None:
            name = self._folder.resolve().name
            peft_extras.add(scratch, name, base_model, model_dir, loader)
        self._folder.mkdir(exist_ok=True)
        peft_extras.prepare(self._folder, scratch)
        for path in sorted(scratch.rglob("*")):
            place = self._folder / path.relative_to(scratch)
            if path.is_dir():
                place.mkdir(exist_ok=True)
            else:
                os.replace(path, place)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
