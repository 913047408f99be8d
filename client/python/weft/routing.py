"""How a proxy in front of several servers finds the one that holds an adapter."""

from __future__ import annotations

ADAPTER_HEADER = "weft-adapter-id"


def adapter_metadata(request: object) -> tuple[tuple[str, str], ...]:
    """The id of the adapter that the request names, as metadata.

    Metadata holds visible ASCII alone. An id that is something else is no
    adapter's: any server refuses it.
    """
    # SampleStreamRequest holds a SampleRequest.
    named = getattr(request, "request", request)
    adapter_id = str(getattr(named, "adapter_id", ""))
    if adapter_id.isascii() and adapter_id.isprintable() and " " not in adapter_id:
        return ((ADAPTER_HEADER, adapter_id),) if adapter_id else ()
    return ()
