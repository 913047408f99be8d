"""Makes the metadata of a call beside the credentials: the id of the call's adapter, by
which a proxy in front of several servers finds the server that has the adapter; the
checkpoint from which the call samples, which any of the servers can do; and the ids by
which the server's log names the call."""

from __future__ import annotations

import re
from contextvars import ContextVar

from weft.errors import InvalidArgument

ADAPTER_HEADER = "weft-adapter-id"
CHECKPOINT_HEADER = "weft-checkpoint"
Metadata = tuple[tuple[str, str], ...]
# Metadata of the calls that a request of the OpenAI front causes: its trace ids.
trace_metadata: ContextVar[Metadata] = ContextVar("trace_metadata", default=())

# The server's rule for names. An operator also names an adapter as TENANT~NAME.
_RULE = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_NAME = re.compile(_RULE + r"(?<!\.)")
_TENANT_BYTES = 64
_SHOWN = 48  # Characters of a refused value.


def is_name(text: str) -> bool:
    """Returns whether the server takes a text as the name of an adapter or snapshot."""
    return _NAME.fullmatch(text) is not None


def split_model(model: str) -> tuple[str, str | None]:
    """Returns adapter and snapshot of ADAPTER or ADAPTER@SNAPSHOT."""
    adapter, at, snapshot = model.partition("@")
    return adapter, snapshot if at else None


def adapter_of(request: object) -> str:
    """Returns the id of the adapter that a request is for; "" if it is for none."""
    # SampleStreamRequest holds a SampleRequest.
    named = getattr(request, "request", request)
    return str(getattr(named, "adapter_id", ""))


def _checkpoint_of(request: object) -> str:
    """Returns the checkpoint from which a request samples; "" if there is none."""
    checkpoint = getattr(getattr(request, "request", request), "checkpoint", "")
    return checkpoint if isinstance(checkpoint, str) else ""


def call_metadata(request: object) -> Metadata:
    """Returns the metadata of a call.

    Raises InvalidArgument if the request names an adapter that no server can have,
    because a proxy may end other calls of the connection for a header that is too long.
    """
    adapter_id = adapter_of(request)
    if not adapter_id:
        return trace_metadata.get()
    tenant, tilde, name = adapter_id.partition("~")
    qualified = is_name(tenant) and len(tenant) <= _TENANT_BYTES and is_name(name)
    if not (qualified if tilde else is_name(adapter_id)):
        shown = repr(adapter_id[:_SHOWN]) + "..." * (len(adapter_id) > _SHOWN)
        raise InvalidArgument(
            f"adapter_id is {shown}, must match {_RULE} and not end in a dot"
        )
    checkpoint = _checkpoint_of(request)
    # The server refuses what is no name.
    named = ((CHECKPOINT_HEADER, checkpoint),) if is_name(checkpoint) else ()
    return ((ADAPTER_HEADER, adapter_id), *named, *trace_metadata.get())
