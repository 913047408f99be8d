"""Three tenants that attack weftd in every way that a client can. Each kind of attack
is a function. A seed fixes the order of the kinds and the values in them.

    python attacks.py < JSON, the fields of `Target`: prints how often each kind ran.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
from attacker import THREADS, Attacker, Target, kind  # First: it sets the path.
from frames import DATA, END_HEADERS, HEADERS, PREFACE, RESET, SETTINGS, block, frame
from payloads import OF_MUCH, PAYLOADS, custom_loss
from raw import Raw, datum

import weft
from weft import methods
from weft._proto import adapters_pb2 as adapters

TRAIN = "/weft.v1.TrainingService/ForwardBackward"
SAMPLE = "/weft.v1.SamplingService/Sample"
INFO = "/weft.v1.ServerService/GetInfo"
LIST = "/weft.v1.AdapterService/ListCheckpoints"


# The engine's time.


@kind
def giant_batches(a: Attacker) -> None:
    a.check(a.raw.forward_backward(a.adapter, a.data(64, 60), timeout=1.0))


@kind
def long_sequences(a: Attacker) -> None:
    length = a.rng.choice((500, 5000))
    a.check(a.raw.forward_backward(a.adapter, a.data(1, length), timeout=1.0))


@kind
def many_long_samples(a: Attacker) -> None:
    config = {"max_tokens": 500, "stop": {"ignore_eos": True}}
    request = methods.SAMPLE.request_type(
        adapter_id=a.adapter,
        prompt=a.tokens(8),
        num_samples=256,
        config=config,
        top_logprobs=a.rng.choice((0, 20)),
    )
    a.leave(methods.SAMPLE, request, timeout=20)


@kind
def scores_of_long_prompts(a: Attacker) -> None:
    config = {"max_tokens": 1}
    prompt = a.tokens(a.rng.randrange(200, 500))
    call = a.stream(
        methods.SAMPLE_STREAM,
        methods.SAMPLE_STREAM.request_type(
            request={
                # On the base model, where all tenants have the same adapter, too.
                "adapter_id": a.rng.choice((a.adapter, "")),
                "prompt": prompt,
                "prompt_logprobs": True,
                **a.rng.choice(
                    ({"prompt_top_logprobs": 20}, {"prompt_alternatives": 64})
                ),
                "config": config,
            }
        ),
    )
    a.hold(call.cancel)


@kind
def steps_far_ahead(a: Attacker) -> None:
    for step in a.rng.sample(range(5, 70), 20):
        request = methods.FORWARD_BACKWARD.request_type(
            adapter_id=a.adapter, step=step, data=a.data(2, 30), loss={"function": 1}
        )
        a.leave(methods.FORWARD_BACKWARD, request, timeout=5)


@kind
def optimizer_steps(a: Attacker) -> None:
    for _ in range(10):
        a.check(a.raw.optim_step(a.adapter, timeout=1.0))


@kind
def deletes_during_steps(a: Attacker) -> None:
    name = f"{a.adapter}-brief"
    a.raw.create(name, rank=1)
    step = methods.FORWARD_BACKWARD.request_type(
        adapter_id=name, data=a.data(4, 50), loss={"function": 1}
    )
    a.leave(methods.FORWARD_BACKWARD, step, timeout=10)
    request = adapters.DeleteAdapterRequest(adapter_id=name)
    a.check(a.raw.call(methods.DELETE_ADAPTER, request, timeout=5))


@kind
def payloads_that_wait(a: Attacker) -> None:
    """Steps of few tokens and many bytes, some of which wait for one that never comes.
    Their connections break, or they wait for long."""
    name = f"{a.adapter}-waits"
    delete = adapters.DeleteAdapterRequest(adapter_id=name)
    a.check(a.raw.call(methods.DELETE_ADAPTER, delete, timeout=5))
    a.check(a.raw.create(name, rank=1))
    for step in a.rng.sample(range(1, 7), 4):
        request = methods.FORWARD_BACKWARD.request_type(adapter_id=name, step=step)
        request.MergeFrom(_payload(a.rng.randrange(len(PAYLOADS))))
        a.leave(methods.FORWARD_BACKWARD, request, a.rng.choice((2, 20)))


# Memory.


@kind
def losses_that_make_much(a: Attacker) -> None:
    """Small graphs of custom losses whose results or whose autograd would be huge."""
    for expression in OF_MUCH:
        request = methods.FORWARD_BACKWARD.request_type(
            adapter_id=a.adapter, **custom_loss(*expression)
        )
        outcome = a.raw.call(methods.FORWARD_BACKWARD, request, timeout=5)
        a.check(outcome)
        refuses_node = "loss.custom_loss.graph.nodes[" in outcome.message
        if outcome.code in ("OK", "INVALID_ARGUMENT") and not refuses_node:
            a.defects.append(f"a loss that makes much: {outcome.message}")


@kind
def random_losses(a: Attacker) -> None:
    from random_losses import random_loss  # PyTorch takes seconds to begin.

    for _ in range(3):
        length = a.rng.choice((1, 6, 60))
        drawn = random_loss(a.rng.randrange(1 << 30), length)
        graph = weft.trace_loss(drawn, y=1, i=1).graph
        inputs = {
            "y": {"shape": [length], "floats_le": bytes([0, 0, 0, 63]) * length},
            "i": {"shape": [length], "ints_le": bytes([1, *bytes(7)]) * length},
        }
        names = [{"name": name, "rank": 1} for name in ("logprobs", *inputs)]
        data = [datum(a.tokens(length + 1), custom_inputs=inputs)]
        loss = {"function": 8, "custom_loss": {"graph": graph, "inputs": names}}
        count = a.rng.choice((1, 8, 64))
        a.check(
            a.raw.forward_backward(a.adapter, data * count, loss=loss, timeout=10.0)
        )


@kind
def small_parts(a: Attacker) -> None:
    size = a.rng.choice((1 << 16, 1 << 20, 15 << 20))
    a.bytes_of(TRAIN, b"\x1a\x00" * (size // 2))


@kind
def small_stops(a: Attacker) -> None:
    inner = b"\x12\x00" * a.rng.choice((1 << 15, 1 << 19))
    a.bytes_of(SAMPLE, _field(5, _field(6, inner)))


@kind
def unknown_fields(a: Attacker) -> None:
    a.bytes_of(INFO, b"\x0a\x00" * a.rng.choice((1 << 15, 1 << 22)))


@kind
def random_bytes(a: Attacker) -> None:
    for path in (TRAIN, SAMPLE, INFO, LIST):
        a.bytes_of(path, a.rng.randbytes(a.rng.randrange(1, 4000)))


@kind
def messages_too_large(a: Attacker) -> None:
    a.bytes_of(TRAIN, bytes(17 << 20))


@kind
def unread_replies(a: Attacker) -> None:
    other = a.stranger((4, 0))  # No reply may be sent.
    a.hold(other.sock.close)
    for stream in range(1, 201, 2):
        other.request(stream, block(LIST, a.target.token))


@kind
def half_read_exports(a: Attacker) -> None:
    a.raw.call(
        methods.SAVE_CHECKPOINT,
        adapters.SaveCheckpointRequest(adapter_id=a.adapter, name="c", overwrite=True),
        timeout=5,
    )
    export = adapters.ExportAdapterRequest(adapter_id=a.adapter)
    download = adapters.DownloadCheckpointRequest(adapter_id=a.adapter, name="c")
    for method, request in (
        (methods.EXPORT_ADAPTER, export),
        (methods.DOWNLOAD_CHECKPOINT, download),
    ):
        # What is half read fills the connection's window, so this may wait for it.
        call = a.stream(method, request, timeout=20)
        a.hold(call.cancel)
        with contextlib.suppress(grpc.RpcError):
            next(call)


@kind
def stalled_imports(a: Attacker) -> None:
    def parts() -> Iterator[Any]:
        request = adapters.ImportAdapterRequest
        yield request(options={"adapter_id": f"{a.adapter}-in"})
        for _ in range(a.rng.choice((4, 60))):
            chunk = {"name": "adapter_model.safetensors", "data": bytes(1 << 20)}
            yield request(chunk=chunk)
        stalled.wait(60)

    stalled = threading.Event()
    a.leave(methods.IMPORT_ADAPTER, parts(), timeout=60)
    a.hold(stalled.set)


@kind
def snapshots(a: Attacker) -> None:
    for number in range(8):
        name = f"s{a.rng.randrange(1000)}"
        request = adapters.PublishSnapshotRequest(adapter_id=a.adapter, name=name)
        a.check(a.raw.call(methods.PUBLISH_SNAPSHOT, request, timeout=1))
        if number % 2:
            a.check(a.raw.optim_step(a.adapter, timeout=1.0))


@kind
def many_adapters(a: Attacker) -> None:
    for number in range(10):
        name = f"{a.adapter}-{a.rng.randrange(30)}"
        a.check(a.raw.create(name, rank=a.rng.choice((1, 8, 16, 17))))
        if number % 3 == 0:
            request = adapters.DeleteAdapterRequest(adapter_id=name)
            a.check(a.raw.call(methods.DELETE_ADAPTER, request, timeout=5))


# Connections and streams.


@kind
def resets(a: Attacker) -> None:
    token = a.rng.choice((a.target.token, None))
    with a.stranger() as other:
        other.reset_streams(block(INFO, token), seconds=0.5)


@kind
def calls_without_a_message(a: Attacker) -> None:
    other = a.stranger()
    a.hold(other.sock.close)
    for stream in range(1, 201, 2):
        path = a.rng.choice((TRAIN, SAMPLE, INFO, LIST))
        other.request(stream, block(path, a.target.token), body=None)


@kind
def half_messages(a: Attacker) -> None:
    other = a.stranger()
    a.hold(other.sock.close)
    for stream in range(1, 21, 2):
        head = b"\0" + (15 << 20).to_bytes(4, "big")
        other.request(stream, block(TRAIN, a.target.token), body=None)
        other.send(frame(DATA, 0, stream, head + bytes(5000)))


@kind
def odd_frames(a: Attacker) -> None:
    with a.stranger() as other:
        for _ in range(30):
            number = a.rng.choice((HEADERS, DATA, RESET, SETTINGS, 5, 6, 8, 11))
            payload = a.rng.randbytes(a.rng.choice((0, 4, 6, 8, 100)))
            flags = a.rng.randrange(256) & ~END_HEADERS
            other.send(frame(number, flags, a.rng.randrange(4), payload))
        other.frames(0.05)


@kind
def silent_connections(a: Attacker) -> None:
    half = b"GET /metrics HTTP/1.1\r\nHost: localh"
    post = b"POST /api/v1/asample HTTP/1.1\r\nHost: localhost\r\nX-API-Key: tml-"
    post += a.target.token.encode() + b"\r\nContent-Length: 90000\r\n\r\n{"
    for address in (a.target.metrics, a.target.openai, a.target.tinker):
        a.silent(address, half)
    a.silent(a.target.tinker, post)
    a.silent(a.target.grpc, PREFACE[:10])


@kind
def cancelled_calls(a: Attacker) -> None:
    for _ in range(20):
        timeout = a.rng.choice((0.001, 0.01, 0.1))
        a.check(a.raw.forward_backward(a.adapter, a.data(1, 20), timeout=timeout))


# What others have.


@kind
def names_of_others(a: Attacker) -> None:
    for name in ("dave~poet", "../dave/poet", "poet-0", "dave%7Epoet", "poet\0"):
        get = adapters.GetAdapterRequest(adapter_id=name)
        delete = adapters.DeleteAdapterRequest(adapter_id=name)
        for method, request in (
            (methods.GET_ADAPTER, get),
            (methods.DELETE_ADAPTER, delete),
        ):
            outcome = a.raw.call(method, request, timeout=5)
            if outcome.code == "OK":
                a.defects.append(f"{name} is not the attacker's")


@kind
def wrong_tokens(a: Attacker) -> None:
    for token in ("", "weft_wrong", "weft_" + "x" * 43, a.target.token[:-1]):
        with Raw(a.target.grpc, token) as raw:
            outcome = raw.optim_step(a.adapter, timeout=5)
        if outcome.code == "OK":
            a.defects.append(f"token {token!r} is taken")
        a.ask("/api/v1/sessions", method="GET", X_API_Key="tml-" + token)


@kind
def bad_values(a: Attacker) -> None:
    nan, huge = float("nan"), 1e300
    for value in (nan, huge, -1.0, 5e-324):
        a.check(
            a.raw.optim_step(a.adapter, adamw={"learning_rate": value}, timeout=1),
            a.raw.forward_backward(
                a.adapter, [{**datum(a.tokens(5)), "weights": [value] * 4}], timeout=1
            ),
        )
    for rank in (0, 129, 2**32 - 1):
        a.check(a.raw.create(f"{a.adapter}-bad", rank=rank))
    step = {"step": 2**64 - 1}
    a.check(a.raw.forward_backward(a.adapter, a.data(1, 4), timeout=1, **step))


@kind
def listings(a: Attacker) -> None:
    for number in range(20):
        a.check(
            a.raw.call(
                methods.LIST_CHECKPOINTS, adapters.ListCheckpointsRequest(), timeout=5
            )
        )
        if number < 3:
            save = adapters.SaveCheckpointRequest(
                adapter_id=a.adapter,
                name=f"c{a.rng.randrange(10)}",
                overwrite=True,
                kind=adapters.CHECKPOINT_KIND_SAMPLER,
                metadata={"k": "x" * 10_000},
            )
            a.check(a.raw.call(methods.SAVE_CHECKPOINT, save, timeout=5))


# The Tinker API.


def _model(a: Attacker) -> tuple[str, str]:
    """Returns a new session and a new model of it. Either may be empty."""
    reply = a.ask("/api/v1/create_session", {"sdk_version": "0"})[1]
    session = reply.get("session_id", "") if isinstance(reply, dict) else ""
    body = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": a.target.model_name,
        "lora_config": {"rank": 1},
    }
    reply = a.ask("/api/v1/create_model", body)[1]
    return session, reply.get("model_id", "") if isinstance(reply, dict) else ""


@kind
def sessions(a: Attacker) -> None:
    metadata = {"user_metadata": {"a": "x" * a.rng.choice((10, 3000, 200_000))}}
    for _ in range(20):
        a.ask("/api/v1/create_session", metadata)


@kind
def zstd_bombs(a: Attacker) -> None:
    bomb = _zstd(a.rng.choice(b"[ \0\n"), a.rng.choice((1 << 20, 1 << 28)))
    path = a.rng.choice(("create_session", "forward_backward", "asample", "telemetry"))
    kinds = ("application/json", "application/x-protobuf")
    a.ask(
        f"/api/v1/{path}",
        bomb,
        Content_Encoding="zstd",
        Content_Type=a.rng.choice(kinds),
    )


@kind
def telemetry(a: Attacker) -> None:
    for _ in range(5):
        a.ask("/api/v1/telemetry", b'{"a":[' + b"{}," * 300_000 + b"{}]}")


@kind
def sparse_tensors(a: Attacker) -> None:
    _, model = _model(a)
    sparse = {
        "data": [],
        "dtype": "float32",
        "shape": [7, 16 << 20],
        "sparse_crow_indices": [0] * 8,
        "sparse_col_indices": [],
    }
    chunk = {"type": "encoded_text", "tokens": a.tokens(7)}
    item = {
        "model_input": {"chunks": [chunk]},
        "loss_fn_inputs": {"target_tokens": sparse, "weights": sparse},
    }
    body = {"data": [item] * 3, "loss_fn": "cross_entropy"}
    for seq in range(2, 12):
        a.ask(
            "/api/v1/forward_backward",
            {"model_id": model, "seq_id": seq, "forward_backward_input": body},
        )


@kind
def unfetched_results(a: Attacker) -> None:
    session, model = _model(a)
    adam = {"adam_params": {"learning_rate": 1e-4}, "model_id": model}
    for seq in a.rng.sample(range(1, 60), 20):
        a.ask("/api/v1/optim_step", {**adam, "seq_id": seq})
    if a.rng.random() < 0.5:
        a.ask(f"/api/v1/sessions/{session}/finish", {})


@kind
def samples_of_the_base_model(a: Attacker) -> None:
    session, _ = _model(a)
    reply = a.ask(
        "/api/v1/create_sampling_session",
        {
            "session_id": session,
            "sampling_session_seq_id": 0,
            "base_model": a.target.model_name,
        },
    )[1]
    sampler = reply.get("sampling_session_id") if isinstance(reply, dict) else None
    for seq in range(5):
        chunk = {"type": "encoded_text", "tokens": a.tokens(50)}
        a.ask(
            "/api/v1/asample",
            {
                "sampling_session_id": sampler,
                "seq_id": seq,
                "num_samples": a.rng.choice((1, 1000, 10**9)),
                "prompt": {"chunks": [chunk]},
                "sampling_params": {"max_tokens": 200, "temperature": 1.0},
            },
        )


@kind
def bad_json(a: Attacker) -> None:
    bodies = (b"{", b"[" * 100_000, b'{"a":' * 5000, b"\xff" * 100, b"1e999999", b"{}")
    paths = ("create_session", "create_model", "optim_step", "asample", "weights_info")
    for body in bodies:
        a.ask(f"/api/v1/{a.rng.choice(paths)}", body)


@kind
def odd_requests(a: Attacker) -> None:
    for headers in (
        "Transfer-Encoding: xchunked",
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: -1",
        "X: " + "y" * 70_000,
        "Host: evil.example",
    ):
        text = f"POST /api/v1/telemetry HTTP/1.1\r\n{headers}\r\n\r\n{{}}"
        for address in (a.target.tinker, a.target.metrics, a.target.openai):
            with a.connect(address) as sock:
                sock.sendall(text.encode())
                sock.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    sock.recv(1000)


# The front for OpenAI's API.


@kind
def long_texts(a: Attacker) -> None:
    key = a.rng.choice((a.target.token, "wrong"))
    body = {"model": a.target.model_name, "prompt": "la " * 200_000, "max_tokens": 1}
    a.ask(
        "/v1/completions", body, address=a.target.openai, Authorization=f"Bearer {key}"
    )


@kind
def odd_models(a: Attacker) -> None:
    for model in ("x" * 9000, "../dave/poet", "dave~poet-0", "\n", ""):
        a.ask(
            "/v1/chat/completions",
            {"model": model, "messages": [{"role": "user", "content": "x"}]},
            address=a.target.openai,
            Authorization=f"Bearer {a.target.token}",
        )


@functools.cache
def _payload(kind: int) -> Any:
    return methods.FORWARD_BACKWARD.request_type(**PAYLOADS[kind](1))


def _field(number: int, body: bytes) -> bytes:
    """Returns a field of a protobuf message."""
    length, head = len(body), bytearray([number << 3 | 2])
    while length > 127:
        head.append(length % 128 + 128)
        length //= 128
    return bytes([*head, length]) + body


def _zstd(byte: int, size: int) -> bytes:
    """Returns a zstd frame of `size` equal bytes: blocks that say byte and count."""
    block, blocks = 1 << 17, size >> 17
    head = b"\x28\xb5\x2f\xfd\xa0" + size.to_bytes(4, "little")
    middle = (block << 3 | 2).to_bytes(3, "little") + bytes([byte])
    last = (block << 3 | 3).to_bytes(3, "little") + bytes([byte])
    return head + middle * (blocks - 1) + last


def main() -> None:
    os.nice(10)  # The server has the processors first.
    target = Target(**json.loads(sys.stdin.readline()))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    attackers = [Attacker(target, number) for number in range(THREADS)]
    threads = [
        threading.Thread(target=attacker.run_or_tell, args=(stop,), daemon=True)
        for attacker in attackers
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.1)
        if not stop.is_set():
            continue
        for attacker in attackers:
            attacker.release()
        if all(attacker.has_done_its_part for attacker in attackers):
            break  # A thread may be inside a call that does not end.
    counts = sum((attacker.counts for attacker in attackers), Counter())
    defects = [text for attacker in attackers for text in attacker.defects]
    print(json.dumps({"counts": counts, "defects": defects}), flush=True)
    os._exit(0)  # Calls that are held open do not end by themselves.


if __name__ == "__main__":
    main()
