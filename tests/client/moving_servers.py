"""Several gRPC servers with one state, of which one at a time is the owner, or each has
some adapters, in the test's own process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc

import weft
from weft import methods
from weft._proto import adapters_pb2, errors_pb2, sampling_pb2, server_pb2
from weft.routing import adapter_of

Code = grpc.StatusCode
# All methods that the servers have.
METHODS = {
    one.path: one
    for one in (
        methods.CREATE_ADAPTER,
        methods.GET_ADAPTER,
        methods.LIST_ADAPTERS,
        methods.GET_INFO,
        methods.DRAIN,
        methods.OPTIM_STEP,
        methods.SAMPLE_STREAM,
        methods.UPLOAD_CHECKPOINT,
        methods.DOWNLOAD_CHECKPOINT,
    )
}


def client_of(*targets: str, **options: object) -> weft.Client:
    policy = weft.RetryPolicy(initial_delay=0.01, max_delay=0.05)
    given = {"timeout": 20.0, "retry": policy, **options}
    return weft.Client(",".join(targets), **given)  # type: ignore[arg-type]


def refuse(context: Any, code: grpc.StatusCode, reason: str, **values: str) -> None:
    """Ends a call as weftd does."""
    info = errors_pb2.ErrorInfo(reason=reason, domain="weft", metadata=values)
    status = errors_pb2.StatusDetails(code=code.value[0], message="refused")
    detail = status.details.add(value=info.SerializeToString())
    detail.type_url = "type.googleapis.com/google.rpc.ErrorInfo"
    details = ("grpc-status-details-bin", status.SerializeToString())
    context.set_trailing_metadata((details, ("weft-trace-id", "1")))
    context.abort(code, "refused")


class MovingServers:
    """Servers 0 to count - 1 on free ports of the loopback interface.

    owner: the index of the owner; None: there is none. homes: the owner of an adapter,
    if it is another. beliefs: whom a server that is not the owner names, if that is not
    the owner: an address, or "" for nobody. pages: the adapters that a server lists.
    others: the servers that it names then. after_page: is called after each page. done:
    the steps that ran, each with the server that ran it. asked: the server of each call
    so far. loses: of so many steps the answer to one is lost; 0: none is. uploaded: the
    bytes of each upload that ended.
    """

    def __init__(self, count: int) -> None:
        self.owner: int | None = 0
        self.homes: dict[str, int] = {}
        self.beliefs: dict[int, str] = {}
        self.pages: dict[int, list[list[str]]] = {}
        self.others: dict[int, list[str]] = {}
        self.after_page: Callable[[], None] = lambda: None
        self.done: list[tuple[int, int]] = []
        self.asked: list[int] = []
        self.loses = 0
        self.uploaded: list[bytes] = []
        self.steps: Counter[str] = Counter()  # Of each adapter.
        self._lock = threading.Lock()
        self._servers = []
        self.targets = []
        for index in range(count):
            server = grpc.server(
                ThreadPoolExecutor(16), handlers=[_Handler(self, index)]
            )
            port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            self._servers.append(server)
            self.targets.append(f"127.0.0.1:{port}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.stop(None).wait()

    def kill(self, index: int) -> None:
        self._servers[index].stop(None).wait()

    def move(self, owner: int | None) -> None:
        with self._lock:
            self.owner = owner

    def check(self, index: int, context: Any, adapter_id: str = "") -> None:
        """Refuses a call at a server that is not the owner."""
        with self._lock:
            self.asked.append(index)
            home = self.homes.get(adapter_id, self.owner)
            serves = index == self.owner or index in self.homes.values()
            runs = index == home or (serves and not adapter_id)
            if runs and index not in self.beliefs:
                return
            owner = "" if home is None else self.targets[home]
            owner = self.beliefs.get(index, owner)
        if owner:
            only = {"adapter": adapter_id} if serves and adapter_id else {}
            refuse(context, Code.FAILED_PRECONDITION, "MOVED", address=owner, **only)
        refuse(context, Code.UNAVAILABLE, "STANDBY")

    def step(self, index: int, request: Any, context: Any) -> None:
        """Runs the adapter's next step once. Refuses one that comes too early."""
        adapter_id, number = request.adapter_id, request.step
        with self._lock:
            ran = self.steps[adapter_id]
            if number == ran + 1 and index == self.homes.get(adapter_id, self.owner):
                self.steps[adapter_id] = number
                self.done.append((number, index))
                if self.loses and number % self.loses == 0:
                    context.abort(Code.UNAVAILABLE, "the answer is lost")
                return
        if number > ran:
            context.set_trailing_metadata((("grpc-retry-pushback-ms", "1"),))
            context.abort(Code.UNAVAILABLE, "an earlier step is missing")

    def listed(self, index: int, token: str) -> adapters_pb2.ListAdaptersResponse:
        """Returns the page of a server after `token`, the number of pages before it."""
        pages, place = self.pages[index], int(token or 0)
        last = place + 1 == len(pages)
        page = adapters_pb2.ListAdaptersResponse(
            adapters=[adapters_pb2.Adapter(adapter_id=one) for one in pages[place]],
            next_page_token="" if last else str(place + 1),
            others=[] if token else self.others.get(index, []),
        )
        self.after_page()
        return page


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, servers: MovingServers, index: int) -> None:
        self._servers, self._index = servers, index

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = METHODS[details.method]

        def one(request: Any, context: Any) -> Any:
            self._servers.check(self._index, context, adapter_of(request))
            if method is methods.LIST_ADAPTERS:
                return self._servers.listed(self._index, request.page_token)
            if method is methods.OPTIM_STEP:
                self._servers.step(self._index, request, context)
            return self._reply(method, adapter_of(request))

        def upload(requests: Iterator[Any], context: Any) -> Any:
            first = next(requests)
            if not first.HasField("options"):
                context.abort(Code.INVALID_ARGUMENT, "it must begin with options")
            self._servers.check(self._index, context, first.options.adapter_id)
            data = b"".join(request.chunk.data for request in requests)
            self._servers.uploaded.append(data)
            return self._reply(method)

        def stream(request: Any, context: Any) -> Iterator[Any]:
            self._servers.check(self._index, context, adapter_of(request))
            for token in range(3):
                yield sampling_pb2.SampleStreamResponse(tokens=[token], logprobs=[-1.0])

        handlers = {
            methods.Arity.UNARY: (grpc.unary_unary_rpc_method_handler, one),
            methods.Arity.UPLOAD: (grpc.stream_unary_rpc_method_handler, upload),
            methods.Arity.DOWNLOAD: (grpc.unary_stream_rpc_method_handler, stream),
        }
        make, behavior = handlers[method.arity]
        return make(
            behavior,
            method.request_type.FromString,
            method.response_type.SerializeToString,
        )

    def _reply(self, method: methods.Method[Any, Any], adapter_id: str = "a") -> Any:
        next_step = self._servers.steps[adapter_id] + 1
        adapter = adapters_pb2.Adapter(
            adapter_id=adapter_id, next_step=next_step, epoch=1
        )
        model = server_pb2.ModelInfo(name="toy", context_length=64, vocab_size=257)
        if method in (methods.CREATE_ADAPTER, methods.GET_ADAPTER):
            return method.response_type(adapter=adapter)
        if method is methods.GET_INFO:
            return method.response_type(info=server_pb2.ServerInfo(model=model))
        return method.response_type()
