"""Puts the id of a call's adapter into the call's metadata. A proxy in front of several
servers uses the id to find the server that has the adapter."""

from __future__ import annotations

ADAPTER_HEADER = "weft-adapter-id"


def adapter_metadata(request: object) -> tuple[tuple[str, str], ...]:
    """Returns the id of the adapter that the request names, as metadata.

    Leaves out an id with characters other than visible ASCII. Metadata cannot hold
    most such characters, and every server refuses such an id.
    """
    # SampleStreamRequest holds a SampleRequest.
    named = getattr(request, "request", request)
    adapter_id = str(getattr(named, "adapter_id", ""))
    if adapter_id.isascii() and adapter_id.isprintable() and " " not in adapter_id:
        return ((ADAPTER_HEADER, adapter_id),) if adapter_id else ()
    return ()
