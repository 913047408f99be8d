"""Names of models: the base model, ADAPTER, ADAPTER@SNAPSHOT, and the Tinker API's
paths of checkpoints."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Iterable, Iterator

from weft.aio import AsyncClient
from weft.aio_adapter import AsyncAdapter, AsyncSampler
from weft.errors import InvalidArgument, NotFound
from weft.routing import is_name, split_model
from weft.types import ArrayLike, SampleDelta, SampleOptions, SampleResult

# Names of adapters that clients of the Tinker API made.
_OF_TINKER = re.compile(r"([^~]*~)?(log[0-9]{3}|[0-9a-f]{6})[0-9a-f]{26}\.train\.")
_SCHEME = "tinker://"
_PATH = re.compile(
    _SCHEME + r"([A-Za-z0-9~:._-]+)/((?:sampler_|external_)?weights)/([A-Za-z0-9._-]+)"
)
# Ends Tinker's names of variants of a model, before the most tokens of a sequence.
_VARIANT = ":peft:"


def is_of_tinker(model: str) -> bool:
    """Returns whether a name is one that no client of the Tinker API has seen, though
    the model is its own."""
    return _OF_TINKER.match(model) is not None


def is_base(model: str, names: Iterable[str], context: int) -> bool:
    """Returns whether a name is one of `names`, also behind a slash, in another case or
    as a variant, as for the Tinker API. Raises InvalidArgument if the variant has
    longer sequences than the server, which has `context` tokens."""
    plain, variant, number = model.partition(_VARIANT)
    if model.startswith(_SCHEME):
        return False
    if not any(f"/{plain}".lower().endswith(f"/{name}".lower()) for name in names):
        return False
    if variant and not (number.isdecimal() and 1 <= int(number[:9]) <= context):
        raise InvalidArgument(
            f"model is {model[:300]!r}, the number must be in [1, {context}]: use "
            f"{plain[:300]!r}"
        )
    return True


def _missing(model: str) -> NotFound:
    shown = repr(model[:300]) + "..." * (len(model) > 300)
    return NotFound(f"the model {shown} does not exist: GET /v1/models lists all")


@contextlib.contextmanager
def _named(model: str) -> Iterator[None]:
    """Turns NotFound into an error that names the model."""
    try:
        yield
    except NotFound as error:
        raise _missing(model) from error


def _checkpoint(path: str) -> tuple[str, str]:
    """Returns adapter and name of the checkpoint of a path."""
    found = _PATH.fullmatch(path)
    if found is None:
        raise _missing(path)
    run, kind, name = found.groups()
    return run.replace(":train:", ".train."), (
        name if kind == "weights" else f"{kind}.{name}"
    )


class Weights:
    """The weights that a model name stands for: those of the base model, or an
    adapter's latest ones, or those of a snapshot or checkpoint.

    The server looks for the snapshot or checkpoint when it samples. So a request need
    not list them first.
    """

    def __init__(self, sampler: AsyncSampler, snapshot: str | None, model: str) -> None:
        self._sampler = sampler
        self._snapshot = snapshot
        self._model = model

    async def sample_many(
        self, prompts: Iterable[ArrayLike], options: SampleOptions
    ) -> list[SampleResult]:
        with _named(self._model):
            return await self._sampler.sample_many(
                prompts, snapshot=self._snapshot, **options
            )

    async def sample_stream(
        self, prompt: ArrayLike, options: SampleOptions
    ) -> AsyncIterator[SampleDelta]:
        with _named(self._model):
            async for delta in self._sampler.sample_stream(
                prompt, snapshot=self._snapshot, **options
            ):
                yield delta


async def model_ids(client: AsyncClient) -> dict[str, int]:
    """Returns the names that the caller may use, with Unix times of creation."""
    info = await client.info()
    names = {info.model.name: 0}
    for adapter in await client.adapters():
        created = int(adapter.created_at)
        names[adapter.adapter_id] = created
        for snapshot in adapter.snapshots:
            names[f"{adapter.adapter_id}@{snapshot}"] = created
    return names


async def find_weights(client: AsyncClient, base: str, model: str) -> Weights:
    """Returns the weights of a model name. Makes at most one call to the server.

    Raises NotFound if there is no such adapter. If there is no such snapshot or
    checkpoint, the methods of the weights raise NotFound.
    """
    if model == base:
        return Weights(client, None, model)
    if model.startswith(_SCHEME):
        return Weights(client.checkpoint(*_checkpoint(model)), None, model)
    adapter, snapshot = _split(model)
    return Weights(await _adapter(client, adapter, model), snapshot, model)


async def find_created(client: AsyncClient, base: str, model: str) -> int:
    """Returns the Unix time at which the model's adapter or checkpoint was created; 0
    for the base model. Raises NotFound if there is no such model."""
    if model == base:
        return 0
    if model.startswith(_SCHEME):
        adapter, name = _checkpoint(model)
        for one in await client.checkpoints(adapter):
            if one.name == name:
                return int(one.created_at)
        raise _missing(model)
    adapter, snapshot = _split(model)
    handle = await _adapter(client, adapter, model)
    with _named(model):
        info = await handle.info()
    if snapshot is not None and snapshot not in info.snapshots:
        raise _missing(model)
    return int(info.created_at)


def _split(model: str) -> tuple[str, str | None]:
    adapter, snapshot = split_model(model)
    if snapshot is not None and not is_name(snapshot):
        raise _missing(model)
    return adapter, snapshot


async def _adapter(client: AsyncClient, adapter: str, model: str) -> AsyncAdapter:
    with _named(model):
        try:
            return await client.adapter(adapter, suggests=False)
        except InvalidArgument as error:  # No adapter can have this name.
            raise _missing(model) from error
