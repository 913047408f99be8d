"""A model of the Tinker API, which trains as the SDK does."""

from __future__ import annotations

import http.client
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import daemon
import numpy as np
from processes import RANK

NAME = "bench"  # The base model's name, for --model-name.


class TinkerModel:
    """A client of the Tinker API with one model."""

    def __init__(self, address: str, work: Path, rows: np.ndarray) -> None:
        host, port = address.split(":")
        self._connection = http.client.HTTPConnection(host, int(port))
        self._wire = _wire(work)
        session = self._ask("create_session", {"sdk_version": "0"})["session_id"]
        lora = {"rank": RANK, "seed": 0, "train_unembed": False}
        made = {"session_id": session, "model_seq_id": 0, "base_model": NAME}
        self._retrieve(self._ask("create_model", {**made, "lora_config": lora}))
        self._model = f"{session}:train:0"
        self._seq = 0
        self._request = self._wire.ForwardBackwardRequest(
            model_id=self._model, loss_fn="cross_entropy"
        )
        for row in rows:
            datum = self._request.data.add()
            datum.model_input.add().encoded_text.tokens = _raw(row[:-1], np.int32)
            self._tensor(datum, "target_tokens", 2, _raw(row[1:], np.int64), row)
            ones = np.ones(len(row) - 1)
            self._tensor(datum, "weights", 1, _raw(ones, np.float32), row)

    @staticmethod
    def _tensor(datum: Any, name: str, dtype: int, raw: bytes, row: np.ndarray) -> None:
        tensor = datum.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = raw, dtype
        tensor.shape.append(len(row) - 1)

    def forward_backward(self) -> float:
        self._request.seq_id = self._next()
        body = self._request.SerializeToString()
        future = self._ask("forward_backward", body)
        result = self._retrieve(future)
        output = self._wire.ForwardBackwardOutput.FromString(result)
        return float(output.metrics["loss:sum"])

    def optim_step(self) -> None:
        step = {"model_id": self._model, "seq_id": self._next()}
        adam = {"learning_rate": 1e-4}
        self._retrieve(self._ask("optim_step", {**step, "adam_params": adam}))

    def _next(self) -> int:
        # The server closes a connection that was idle during gRPC's turn.
        self._connection.close()
        self._seq += 1
        return self._seq

    def _retrieve(self, future: Any) -> bytes:
        body = {"request_id": future["request_id"]}
        return self._post("retrieve_future", json.dumps(body).encode())

    def _ask(self, path: str, body: dict[str, Any] | bytes) -> Any:
        is_raw = isinstance(body, bytes)
        return json.loads(
            self._post(path, body if is_raw else json.dumps(body).encode(), is_raw)
        )

    def _post(self, path: str, body: Any, is_raw: bool = False) -> bytes:
        kind = "application/x-protobuf"
        headers = {
            "X-API-Key": "tml-bench",
            "Content-Type": kind if is_raw else "application/json",
            "Accept": kind,
        }
        reply = None
        while reply is None or reply.status == 408:  # No result yet.
            self._connection.request("POST", f"/api/v1/{path}", body, headers)
            reply = self._connection.getresponse()
            text = reply.read()
        if reply.status != 200:
            raise SystemExit(f"{path}: {reply.status} {text[:300]!r}")
        return text


def _raw(values: np.ndarray, dtype: Any) -> bytes:
    return np.ascontiguousarray(values, dtype).tobytes()


def _wire(work: Path) -> Any:
    """Returns the Python module that protoc generates from wire.proto."""
    source = daemon.REPOSITORY / "server" / "tinker"
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc"]
        + ["-I", str(source), f"--python_out={work}", "wire.proto"],
        check=True,
    )
    sys.path.insert(0, str(work))
    return importlib.import_module("wire_pb2")
