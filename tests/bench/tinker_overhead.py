"""Times a ForwardBackward of many short data over the Tinker front and over gRPC.

Both send the same data to the same daemon, in turns. The times include serializing
the request and parsing the result at the client.
"""

from __future__ import annotations

import argparse
import http.client
import importlib
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import daemon
import inputs
import numpy as np
import report
import timing
from processes import RANK, running, scratch

import weft

MOST_COST = 0.10  # Extra time over Tinker, as a fraction of the time over gRPC.
MODEL = "bench"


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    rows = inputs.rows(options.model, options.data, options.length + 1)
    with scratch() as work:
        runs = [_round(options, work, rows) for _ in range(options.rounds)]
    sides = {
        side: {
            "seconds": [seconds for run in runs for seconds in run[side]["seconds"]],
            "loss": runs[-1][side]["loss"],
        }
        for side in ("tinker", "grpc")
    }
    losses = (sides["tinker"]["loss"], sides["grpc"]["loss"])
    report.expect_close("loss", *losses, report.LOSS_TOLERANCE)
    middle = {side: statistics.median(of["seconds"]) for side, of in sides.items()}
    ratio = middle["tinker"] / middle["grpc"]
    report.emit_ratios(
        "tinker_overhead",
        options,
        ours={"tinker": sides["tinker"]},
        peer={"grpc": sides["grpc"]},
        ratio={"seconds tinker/grpc": report.ratio(ratio, at_most=1 + MOST_COST)},
        config=report.config(options, "data", "rounds", tokens=options.length),
    )
    return 0


def _round(
    options: argparse.Namespace, work: Path, rows: np.ndarray
) -> dict[str, report.Run]:
    address = f"127.0.0.1:{daemon.free_port()}"
    flags = ("--tinker-listen", address, "--model-name", MODEL)
    with running(options, work, *flags) as (_, client):
        adapter = client.create_adapter("bench", rank=RANK)
        ones = np.ones(options.length, np.float32)
        data = [weft.Datum(row[:-1], row[1:], weights=ones) for row in rows]
        tinker = _Tinker(address, work, rows)
        ways = {
            "grpc": lambda: adapter.forward_backward(data).metrics["loss:sum"],
            "tinker": tinker.forward_backward,
        }
        result: dict[str, report.Run] = {}
        for side, way in ways.items():
            loss = way()
            result[side] = {"loss": loss, "seconds": []}
        for _ in range(options.reps):
            for side, way in ways.items():
                result[side]["seconds"] += timing.each(way, 1)
        return result


class _Tinker:
    """A client of the Tinker API with one model."""

    def __init__(self, address: str, work: Path, rows: np.ndarray) -> None:
        host, port = address.split(":")
        self._connection = http.client.HTTPConnection(host, int(port))
        self._wire = _wire(work)
        session = self._ask("create_session", {"sdk_version": "0"})["session_id"]
        lora = {"rank": RANK, "seed": 0, "train_unembed": False}
        made = {"session_id": session, "model_seq_id": 0, "base_model": MODEL}
        self._retrieve(self._ask("create_model", {**made, "lora_config": lora}))
        self._request = self._wire.ForwardBackwardRequest(
            model_id=f"{session}:train:0", seq_id=0, loss_fn="cross_entropy"
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
        # The server closes a connection that was idle during gRPC's turn.
        self._connection.close()
        self._request.seq_id += 1
        body = self._request.SerializeToString()
        future = self._ask("forward_backward", body)
        result = self._retrieve(future)
        output = self._wire.ForwardBackwardOutput.FromString(result)
        return float(output.metrics["loss:sum"])

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


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("tinker_overhead", __doc__)
    parser.add_argument("--data", type=int, default=1024, help="of one request")
    parser.add_argument("--length", type=int, default=16, help="tokens of each")
    return report.parse_with_model(parser, arguments)
