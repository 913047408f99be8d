"""Errors of the service as exceptions, one class per gRPC code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from weft._proto import errors_pb2


class WeftError(Exception):
    """A call failed. `code` is gRPC's name of the reason.

    retry_after: the server's hint in seconds; None where it gave none.
    step_done: the step ran and this is its answer; its number is used.
    reason, values: for programs, as weft/v1/errors.proto lists them; "" and {} where
    the code says all.
    """

    code = "UNKNOWN"
    retry_after: float | None = None
    step_done: bool = False
    reason: str = ""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.values: dict[str, str] = {}
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class InvalidArgument(WeftError, ValueError):
    """The request breaks a rule; the message names field, value and limit.

    Also raised by the client itself for what cannot be sent at all.
    """

    code = "INVALID_ARGUMENT"


class NotFound(WeftError):
    """No such adapter, checkpoint or snapshot."""

    code = "NOT_FOUND"


class AlreadyExists(WeftError):
    """The name is taken, or a step number was used with another payload."""

    code = "ALREADY_EXISTS"


class PermissionDenied(WeftError):
    """The credentials do not allow this call."""

    code = "PERMISSION_DENIED"


class Unauthenticated(WeftError):
    """The server wants credentials that were not sent or are not valid."""

    code = "UNAUTHENTICATED"


class ResourceExhausted(WeftError):
    """A limit of the server is reached; `retry_after` says when to try."""

    code = "RESOURCE_EXHAUSTED"


class FailedPrecondition(WeftError):
    """The state of the adapter, the server or this client forbids the call."""

    code = "FAILED_PRECONDITION"


class Aborted(WeftError):
    """The call lost against another one."""

    code = "ABORTED"


class OutOfRange(WeftError):
    """A step number that the server no longer or not yet knows."""

    code = "OUT_OF_RANGE"


class Unimplemented(WeftError):
    """This server cannot do that."""

    code = "UNIMPLEMENTED"


class Internal(WeftError):
    """A bug in the server."""

    code = "INTERNAL"


class Unavailable(WeftError):
    """The server is not reachable, starting or draining."""

    code = "UNAVAILABLE"


class DataLoss(WeftError):
    """Files on the server do not match their checksums."""

    code = "DATA_LOSS"


class DeadlineExceeded(WeftError):
    """No answer within the time allowed; the call may or may not have run."""

    code = "DEADLINE_EXCEEDED"


class Cancelled(WeftError):
    """The call was cancelled; it may or may not have run."""

    code = "CANCELLED"


_CLASSES: dict[str, type[WeftError]] = {
    cls.code: cls for cls in WeftError.__subclasses__()
}


def make_error(code: str, message: str, retry_after: float | None = None) -> WeftError:
    """The exception for a gRPC code by name."""
    error = _CLASSES.get(code, WeftError)(message, code)
    error.retry_after = retry_after
    return error


def metadata_dict(
    metadata: Iterable[tuple[str, str | bytes]] | None,
) -> dict[str, str]:
    """Text entries of gRPC metadata, by name."""
    pairs = metadata or ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def retry_hint(trailers: dict[str, str]) -> float | None:
    """Seconds of gRPC's `grpc-retry-pushback-ms`; None = do not retry."""
    try:
        milliseconds = int(trailers.get("grpc-retry-pushback-ms", ""))
    except ValueError:
        return None
    return milliseconds / 1000 if milliseconds >= 0 else None


def from_rpc_error(error: grpc.RpcError) -> WeftError:
    """Translates an error that carries a status (sync or asyncio)."""
    # grpc's stubs give the entries a class; they are pairs.
    metadata: Iterable[Any] = error.trailing_metadata()
    trailers = metadata_dict(metadata)
    made = make_error(error.code().name, error.details() or "", retry_hint(trailers))
    made.step_done = "weft-step-done" in trailers
    for key, value in metadata or ():
        if key == "grpc-status-details-bin":
            made.reason, made.values = _reason(value)
    return made


def _reason(details: bytes) -> tuple[str, dict[str, str]]:
    status, info = errors_pb2.StatusDetails(), errors_pb2.ErrorInfo()
    try:
        status.ParseFromString(details)
        for detail in status.details:
            if detail.type_url.endswith("/google.rpc.ErrorInfo"):
                info.ParseFromString(detail.value)
    except DecodeError:
        pass  # Another server's; the code says enough.
    return info.reason, dict(info.metadata)
