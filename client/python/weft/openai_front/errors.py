"""Errors in the form of OpenAI's API, with their HTTP status."""

from __future__ import annotations

import math

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from weft.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OutOfRange,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    WeftError,
)

_STATUS: dict[type[WeftError], tuple[int, str]] = {
    InvalidArgument: (400, "invalid_request_error"),
    OutOfRange: (400, "invalid_request_error"),
    FailedPrecondition: (400, "invalid_request_error"),
    Unimplemented: (400, "invalid_request_error"),
    Unauthenticated: (401, "authentication_error"),
    PermissionDenied: (403, "permission_error"),
    NotFound: (404, "invalid_request_error"),
    ResourceExhausted: (429, "rate_limit_error"),
    Cancelled: (503, "server_error"),
    Unavailable: (503, "server_error"),
    DeadlineExceeded: (504, "server_error"),
}


def body_of(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, object]:
    """Returns the body of an error."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return {"error": error}


def describe(error: WeftError) -> tuple[int, dict[str, object]]:
    """Returns the HTTP status and the body of an error."""
    if (
        isinstance(error, ResourceExhausted)
        and error.retry_after is None
        and error.reason != "OUT_OF_MEMORY"
    ):
        # No wait makes room for the request, so no client shall send it again.
        return 400, body_of(str(error), "invalid_request_error")
    status, kind = next(
        (entry for known, entry in _STATUS.items() if isinstance(error, known)),
        (500, "server_error"),
    )
    missing_model = isinstance(error, NotFound)
    return status, body_of(
        str(error),
        kind,
        param="model" if missing_model else None,
        code="model_not_found" if missing_model else None,
    )


async def on_weft_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, WeftError)
    status, body = describe(error)
    headers = {}
    if error.retry_after is not None and status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    return JSONResponse(body, status, headers)


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Answers a request with an unknown path or method, or with a broken body."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    body = body_of(message, "invalid_request_error")
    return JSONResponse(body, error.status_code, error.headers)


async def on_bad_request(_: Request, error: Exception) -> JSONResponse:
    """Answers a request with a bad field. Names the first bad field, its value and what
    the value must be."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    context = first.get("ctx", {})
    # If a field may have several types, the path ends with the type that was tried.
    path = [str(part) for part in first["loc"] if part != "body"]
    name = path[0] if path and not path[0].isdigit() else None
    text = first["msg"].removeprefix("Value error, ")
    value = repr(first.get("input"))
    if first["type"] == "json_invalid":
        message = f"the body is not JSON: {context.get('error', text)}"
    elif name is None:
        message = text
    else:
        shown = value if len(value) <= 60 else value[:57] + "..."
        message = f"{name} is {shown}: {text}"
    code = first["type"] if "param" in context else None
    param = context.get("param", name)
    return JSONResponse(body_of(message, "invalid_request_error", param, code), 400)
