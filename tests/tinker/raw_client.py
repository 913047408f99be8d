"""A client of the Tinker API that sends what it likes, in any order."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterable
from typing import Any, Protocol

HEADERS = {"Content-Type": "application/json"}
TOKENS = [3, 17, 5, 42, 8, 30, 11, 2]


class Server(Protocol):
    url: str


class RawClient:
    def __init__(self, server: Server, key: str = "tml-any") -> None:
        self._server = server
        self._headers = {**HEADERS, "X-API-Key": key}

    def ask(
        self, path: str, body: dict[str, Any] | None = None, method: str = "POST"
    ) -> tuple[int, Any]:
        host, port = self._server.url.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        try:
            text = None if method == "GET" else json.dumps(body or {})
            connection.request(method, f"/api/v1/{path}", text, self._headers)
            reply = connection.getresponse()
            read = reply.read()
            return reply.status, json.loads(read) if read else None
        finally:
            connection.close()

    def must(self, route: str, /, **body: Any) -> Any:
        """Asks until the server has room, or the result. The status must then be
        200."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            status, reply = self.ask(route, body)
            if status not in (408, 429, 503):
                assert status == 200, (route, status, reply)
                return reply
            time.sleep(0.05)
        raise AssertionError(f"{route}: the server never had room")

    def result(self, future: Any) -> Any:
        return self.must("retrieve_future", request_id=future["request_id"])

    def session(self) -> str:
        return str(self.must("create_session", sdk_version="0")["session_id"])

    def model(self, session: str, number: int = 0) -> str:
        made = self.must(
            "create_model",
            session_id=session,
            model_seq_id=number,
            base_model="toy",
            lora_config={"rank": 4, "seed": 3},
        )
        return str(self.result(made)["model_id"])

    def train(
        self,
        model: str,
        seq: int,
        weight: float = 1.0,
        loss: str = "cross_entropy",
        data: Iterable[list[int]] = (TOKENS,),
    ) -> Any:
        """A forward_backward."""

        def tensor(values: list[Any], dtype: str) -> dict[str, Any]:
            return {"data": values, "dtype": dtype, "shape": [len(values)]}

        def datum(tokens: list[int]) -> dict[str, Any]:
            chunk = {"type": "encoded_text", "tokens": tokens[:-1]}
            return {
                "model_input": {"chunks": [chunk]},
                "loss_fn_inputs": {
                    "target_tokens": tensor(tokens[1:], "int64"),
                    "weights": tensor([weight] * (len(tokens) - 1), "float32"),
                },
            }

        return self.must(
            "forward_backward",
            model_id=model,
            seq_id=seq,
            forward_backward_input={"data": list(map(datum, data)), "loss_fn": loss},
        )

    def step(self, model: str, seq: int) -> Any:
        adam = {"learning_rate": 1e-2}
        return self.must("optim_step", model_id=model, seq_id=seq, adam_params=adam)

    def norm(self, future: Any) -> float:
        return float(self.result(future)["metrics"]["grad_norm"])

    def save(self, model: str, seq: int, name: str) -> Any:
        return self.must("save_weights", model_id=model, seq_id=seq, path=name)

    def load(self, model: str, seq: int, path: str) -> Any:
        return self.must(
            "load_weights", model_id=model, seq_id=seq, path=path, optimizer=True
        )

    def sampler(self, session: str, number: int, path: str) -> Any:
        return self.ask(
            "create_sampling_session",
            {
                "session_id": session,
                "sampling_session_seq_id": number,
                "model_path": path,
            },
        )

    def sample(self, sampler: str, seq: int) -> Any:
        return self.must(
            "asample",
            sampling_session_id=sampler,
            seq_id=seq,
            num_samples=1,
            prompt={"chunks": [{"type": "encoded_text", "tokens": TOKENS}]},
            sampling_params={"max_tokens": 3, "temperature": 0.0, "stop": []},
        )
