"""The service's errors as exceptions, one class per gRPC code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from weft._proto import errors_pb2


class WeftError(Exception):
    """A call failed. `code` is the name of the gRPC status code.

    retry_after: the seconds after which the server suggests a retry, or None.
    repeatable: False if the server asks not to repeat the call at all.
    step_done: the step ran and failed, so its number is used.
    from_server: the server itself sent the error, not the connection to it.
    reason, values: details for programs, listed in weft/v1/errors.proto; "" and {}
    if the server sends none.
    """

    code = "UNKNOWN"
    retry_after: float | None = None
    repeatable: bool = True
    step_done: bool = False
    from_server: bool = False
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
    """The request breaks a rule. The error's text names field, value and limit.

    The client itself raises this error for values that protobuf cannot encode.
    """

    code = "INVALID_ARGUMENT"


class NotFound(WeftError):
    """There is no such adapter, checkpoint or snapshot."""

    code = "NOT_FOUND"


class AlreadyExists(WeftError):
    """The name is taken, or a step number was used with another payload."""

    code = "ALREADY_EXISTS"


class PermissionDenied(WeftError):
    """The credentials do not allow this call."""

    code = "PERMISSION_DENIED"


class Unauthenticated(WeftError):
    """The server requires credentials, and they are missing or not valid."""

    code = "UNAUTHENTICATED"


class ResourceExhausted(WeftError):
    """A limit of the server is reached. `retry_after`, if set, says when to try
    again."""

    code = "RESOURCE_EXHAUSTED"


class FailedPrecondition(WeftError):
    """The state of the adapter, the server or this client forbids the call."""

    code = "FAILED_PRECONDITION"


class Aborted(WeftError):
    """The server aborted the call."""

    code = "ABORTED"


class OutOfRange(WeftError):
    """The server no longer knows this step number, or does not accept it yet."""

    code = "OUT_OF_RANGE"


class Unimplemented(WeftError):
    """This server does not support the call."""

    code = "UNIMPLEMENTED"


class Internal(WeftError):
    """The server has an internal error."""

    code = "INTERNAL"


class Unavailable(WeftError):
    """The server cannot be reached, is starting, or is draining."""

    code = "UNAVAILABLE"


class DataLoss(WeftError):
    """Files on the server do not match their checksums, or a download is incomplete."""

    code = "DATA_LOSS"


class DeadlineExceeded(WeftError):
    """No answer came within the timeout. The call may or may not have run."""

    code = "DEADLINE_EXCEEDED"


class Cancelled(WeftError):
    """The call was cancelled; it may or may not have run."""

    code = "CANCELLED"


_CLASSES: dict[str, type[WeftError]] = {
    cls.code: cls for cls in WeftError.__subclasses__()
}


# Parts of gRPC's messages about TLS that no repetition cures.
_TLS = {
    "WRONG_VERSION_NUMBER": "the server speaks no TLS: leave out tls and certificates "
    "(WEFT_TLS, WEFT_CA)",
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is of no authority that "
    "this client trusts: give its authority (root_certificates, WEFT_CA)",
    "is not in peer certificate": "the server's certificate is for another host: give "
    "one of its names (server_name, WEFT_SERVER_NAME)",
}


def make_error(code: str, message: str, retry_after: float | None = None) -> WeftError:
    """Returns the exception for the name of a gRPC code; a plain WeftError for a code
    without a class."""
    error = _CLASSES.get(code, WeftError)(message, code)
    error.retry_after = retry_after
    return error


def without_frames(error: BaseException) -> BaseException:
    """Returns a call's error without the client's own frames, so that its traceback
    begins where the program waits for the call."""
    if isinstance(error, WeftError):
        error.__suppress_context__ = True
        return error.with_traceback(None)
    return error


def metadata_dict(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """Returns the text entries of gRPC metadata by name. Leaves out binary ones."""
    pairs = metadata or ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def retry_hint(trailers: dict[str, str]) -> tuple[float | None, bool]:
    """Reads the trailer `grpc-retry-pushback-ms`. Returns its delay in seconds, or
    None, and whether the call may be repeated.

    By gRPC's rule (proposal A6) a negative number, or a text that is no number,
    forbids a repetition. Without the trailer the client decides.
    """
    text = trailers.get("grpc-retry-pushback-ms")
    if text is None:
        return None, True
    try:
        milliseconds = int(text)
    except ValueError:
        return None, False
    return (milliseconds / 1000, True) if milliseconds >= 0 else (None, False)


# What gRPC says of a call that ends because this process wants it.
_CANCELLED_HERE = ("Channel closed!", "Locally cancelled by application!")


def from_rpc_error(error: grpc.RpcError) -> WeftError:
    """Converts an error of grpc or grpc.aio that carries a status."""
    # grpc's type stubs declare a class for the entries, but the entries are pairs.
    metadata: Iterable[Any] = error.trailing_metadata()
    trailers = metadata_dict(metadata)
    hint, repeatable = retry_hint(trailers)
    details = error.details() or ""
    code = error.code().name
    if (
        code == "CANCELLED"
        and "weft-trace-id" not in trailers
        and details not in _CANCELLED_HERE
    ):
        # No service has said so: gRPC cut the call off because the server's process
        # ends.
        code = "UNAVAILABLE"
    made = make_error(code, details, hint)
    made.repeatable = repeatable
    for part, remedy in _TLS.items():
        if made.code == "UNAVAILABLE" and part in details:
            made = Unavailable(f"{remedy} ({details})")
            made.repeatable = False
    made.step_done = "weft-step-done" in trailers
    made.from_server = "weft-trace-id" in trailers
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
        pass  # Not details of this service. The gRPC code is enough.
    return info.reason, dict(info.metadata)
