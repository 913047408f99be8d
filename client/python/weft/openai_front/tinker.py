"""Asks for names that the Tinker API of the same server knows: further names of the
base model, and tinker:// paths of checkpoints."""

from __future__ import annotations

from datetime import datetime

import httpx

from weft.errors import (
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    WeftError,
)
from weft.openai_front.answers import Json

ANSWER_SECONDS = 5.0

_ERRORS: dict[int, type[WeftError]] = {
    400: InvalidArgument,
    401: Unauthenticated,
    403: PermissionDenied,
    404: NotFound,
    429: ResourceExhausted,
}


class TinkerPort:
    """A client of the Tinker API at HOST:PORT. `token` is the caller's; None: the
    server needs none. The methods raise WeftError, as gRPC does."""

    def __init__(self, address: str) -> None:
        url = f"http://{address}/api/v1/"
        self._client = httpx.AsyncClient(base_url=url, trust_env=False)
        self._address = address

    async def base_names(self, token: str | None) -> list[str]:
        """Returns all names of the base model."""
        reply = await self._ask(token, "get_server_capabilities")
        return [model["model_name"] for model in reply["supported_models"]]

    async def sampler_paths(self, token: str | None) -> dict[str, int]:
        """Returns the paths of the caller's newest checkpoints for samplers, with Unix
        times of creation."""
        reply = await self._ask(token, "checkpoints?limit=1000")
        return {
            entry["tinker_path"]: int(datetime.fromisoformat(entry["time"]).timestamp())
            for entry in reply["checkpoints"]
            if entry["checkpoint_type"] == "sampler"
        }

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, token: str | None, path: str) -> Json:
        headers = {"X-API-Key": f"tml-{token or 'any'}"}
        try:
            reply = await self._client.get(
                path, headers=headers, timeout=ANSWER_SECONDS
            )
            answer: Json = reply.json()
        except (httpx.HTTPError, ValueError) as error:
            gone = Unavailable(
                f"the Tinker API at {self._address} (--tinker) does not answer: "
                f"{str(error) or type(error).__name__}"
            )
            gone.retry_after = 1.0
            raise gone from None
        if reply.status_code == 200:
            return answer
        made = _ERRORS.get(reply.status_code, Unavailable)(str(answer.get("detail")))
        if "Retry-After" in reply.headers:
            made.retry_after = float(reply.headers["Retry-After"])
        raise made
