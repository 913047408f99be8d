"""Names of models: the base model, ADAPTER, and ADAPTER@SNAPSHOT."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Protocol, Unpack

from weft.aio import AsyncClient
from weft.errors import NotFound
from weft.types import ArrayLike, SampleDelta, SampleOptions, SampleResult


class Sampler(Protocol):
    """What a name of a model stands for."""

    async def sample(
        self, prompt: ArrayLike, **options: Unpack[SampleOptions]
    ) -> SampleResult: ...

    async def sample_many(
        self, prompts: Iterable[ArrayLike], **options: Unpack[SampleOptions]
    ) -> list[SampleResult]: ...

    def sample_stream(
        self, prompt: ArrayLike, **options: Unpack[SampleOptions]
    ) -> AsyncIterator[SampleDelta]: ...


class Snapshot:
    """An adapter's weights under a name, or the latest ones (None)."""

    def __init__(self, client: AsyncClient, adapter: str, name: str | None) -> None:
        self._client = client
        self._adapter = adapter
        self._name = name

    async def sample(
        self, prompt: ArrayLike, **options: Unpack[SampleOptions]
    ) -> SampleResult:
        adapter = await self._client.adapter(self._adapter)
        return await adapter.sample(prompt, snapshot=self._name, **options)

    async def sample_many(
        self, prompts: Iterable[ArrayLike], **options: Unpack[SampleOptions]
    ) -> list[SampleResult]:
        adapter = await self._client.adapter(self._adapter)
        return await adapter.sample_many(prompts, snapshot=self._name, **options)

    async def sample_stream(
        self, prompt: ArrayLike, **options: Unpack[SampleOptions]
    ) -> AsyncIterator[SampleDelta]:
        adapter = await self._client.adapter(self._adapter)
        async for delta in adapter.sample_stream(
            prompt, snapshot=self._name, **options
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


async def find_sampler(client: AsyncClient, base: str, model: str) -> Sampler:
    """Returns the sampler of a name. Raises NotFound if there is no such model."""
    if model == base:
        return client
    adapter, at, snapshot = model.partition("@")
    known = {entry.adapter_id: entry for entry in await client.adapters()}
    if adapter not in known or (at and snapshot not in known[adapter].snapshots):
        raise NotFound(f"the model {model!r} does not exist: GET /v1/models lists all")
    return Snapshot(client, adapter, snapshot if at else None)
