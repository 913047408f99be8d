"""A gRPC server in the test's own process, for tests of connections, credentials and
metadata. It needs no binary."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc

from weft._proto import adapters_pb2, sampling_pb2, server_pb2


class SmallServer(grpc.GenericRpcHandler):
    """Serves info, health and samples on a free port of the loopback interface. It has
    the base model `model` and one adapter, "mine".

    token: the token that each call must have; None: no call needs one. credentials:
    serves TLS with these. calls: the methods and metadata of the calls so far. A stream
    waits for `begin`, which is set, sends one token and waits for `finish`. asked: the
    requests for whole samples. checkpoints: adapters and names of those that are
    listed. refusal: what all samples get, a stream after `begin`.
    draining: what info says. Threads: the fields are for the test's thread, between
    calls.
    """

    def __init__(
        self,
        token: str | None = None,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self.token = token
        self.model = "toy"
        self.draining = False
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.asked: list[sampling_pb2.SampleRequest] = []
        self.checkpoints: list[tuple[str, str]] = []
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.begin = threading.Event()
        self.begin.set()
        self.finish = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(8), handlers=[self])
        if credentials is None:
            port = self._server.add_insecure_port("127.0.0.1:0")
        else:
            port = self._server.add_secure_port("127.0.0.1:0", credentials)
        self.target = f"127.0.0.1:{port}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.begin.set()
        self.finish.set()
        self._server.stop(None).wait()

    def named(self, method: str) -> list[dict[str, Any]]:
        """Returns the metadata of the calls of one method."""
        return [metadata for name, metadata in self.calls if name == method]

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        name = details.method.rpartition("/")[2]
        metadata = {str(key): value for key, value in details.invocation_metadata or ()}
        self.calls.append((name, metadata))
        answers: dict[str, Callable[[bytes], bytes]] = {
            "Check": lambda _: b"\x08\x01",  # SERVING.
            "GetInfo": self._info,
            "GetAdapter": self._adapter,
            "ListAdapters": self._adapters,
            "ListCheckpoints": self._checkpoints,
            "Sample": self._sample,
        }
        bearer = f"Bearer {self.token}"
        refused = self.token is not None and metadata.get("authorization") != bearer

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if refused:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "unknown token")
            if name == "Sample" and self.refusal is not None:
                context.abort(*self.refusal)
            try:
                return answers[name](request)
            except KeyError:
                context.abort(grpc.StatusCode.NOT_FOUND, "no such adapter")
                raise

        def stream(_: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            self.begin.wait(60)
            if self.refusal is not None:
                context.abort(*self.refusal)
            part = sampling_pb2.SampleStreamResponse(tokens=[65], logprobs=[-1.0])
            yield part.SerializeToString()
            self.finish.wait(60)
            part.finish_reason = sampling_pb2.FINISH_REASON_LENGTH
            yield part.SerializeToString()

        if name == "SampleStream":
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(answer)

    def _info(self, _: bytes) -> bytes:
        model = server_pb2.ModelInfo(
            name=self.model, context_length=4096, vocab_size=257
        )
        info = server_pb2.ServerInfo(model=model, draining=self.draining)
        return server_pb2.GetInfoResponse(info=info).SerializeToString()

    def _adapter(self, request: bytes) -> bytes:
        asked = adapters_pb2.GetAdapterRequest.FromString(request).adapter_id
        found = {"mine": adapters_pb2.Adapter(adapter_id="mine")}[asked]
        return adapters_pb2.GetAdapterResponse(adapter=found).SerializeToString()

    def _adapters(self, _: bytes) -> bytes:
        found = [adapters_pb2.Adapter(adapter_id="mine")]
        return adapters_pb2.ListAdaptersResponse(adapters=found).SerializeToString()

    def _checkpoints(self, request: bytes) -> bytes:
        asked = adapters_pb2.ListCheckpointsRequest.FromString(request).adapter_id
        found = [
            adapters_pb2.Checkpoint(adapter_id=adapter, name=name, created_at=1.5)
            for adapter, name in self.checkpoints
            if adapter == asked
        ]
        return adapters_pb2.ListCheckpointsResponse(
            checkpoints=found
        ).SerializeToString()

    def _sample(self, request: bytes) -> bytes:
        self.asked.append(sampling_pb2.SampleRequest.FromString(request))
        sample = sampling_pb2.Sample(tokens=[65], logprobs=[-1.0])
        return sampling_pb2.SampleResponse(samples=[sample]).SerializeToString()
