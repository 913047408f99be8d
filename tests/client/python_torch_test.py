"""Tests what the client takes from torch, and losses that a program computes itself."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from conftest import Sent
from fake_weftd import canned_logprobs

import weft

DATA = [weft.Datum.next_token([1, 2, 3, 4], prompt_length=2)]


def test_torch_rows_may_be_ragged() -> None:
    torch = pytest.importorskip("torch")
    rows = [torch.tensor([3, 4]), torch.tensor([5])]
    weights = [torch.tensor([0.5, 0.5]), torch.tensor([1.0])]
    datum = weft.Datum(torch.tensor([1, 2]), rows, weights)
    assert datum.targets.tolist() == [3, 4, 5]
    assert datum.target_offsets is not None
    assert datum.target_offsets.tolist() == [0, 2, 3]


def test_torch_tensors_of_a_model_are_taken_and_others_named() -> None:
    torch = pytest.importorskip("torch")
    half = torch.tensor([0.5, 0.25], dtype=torch.bfloat16, requires_grad=True)
    datum = weft.Datum([1, 2], [3, 4], half, half, half)
    for values in (datum.weights, datum.logprobs, datum.advantages):
        assert values is not None and values.tolist() == [0.5, 0.25]
    ragged = weft.Datum([1, 2], [[3, 4], []], [half, []])
    assert ragged.weights is not None and ragged.weights.tolist() == [0.5, 0.25]
    elsewhere = torch.empty(2, device="meta")
    texts: Any = ["one", "two"]
    for name in ("weights", "logprobs", "advantages"):
        with pytest.raises(weft.InvalidArgument, match=f"datum.{name}: "):
            weft.Datum([1, 2], [3, 4], **{name: elsewhere})
        with pytest.raises(weft.InvalidArgument, match=f"datum.{name}: "):
            weft.Datum([1, 2], [3, 4], **{name: texts})
    for targets in (half, elsewhere, [[3], half]):
        with pytest.raises(weft.InvalidArgument, match=r"datum.targets: "):
            weft.Datum([1, 2], targets)
    with pytest.raises(weft.InvalidArgument, match=r"datum.targets: .* weight 0"):
        weft.Datum([1, 2], [-100, 4])


def test_custom_loss_sends_the_negative_gradient(
    sent: Sent, client: weft.Client
) -> None:
    adapter = client.create_adapter("a")

    def loss_fn(logprobs: list[np.ndarray]) -> tuple[float, list[np.ndarray]]:
        return float(sum((lp**2).sum() for lp in logprobs)), [
            2 * lp + 1 for lp in logprobs
        ]

    result = adapter.forward_backward_custom(DATA, loss_fn)
    expected = canned_logprobs(np.array([2, 3, 4], "u4"))
    expected[0] = 0  # The first target has weight 0.
    weights = np.frombuffer(sent[-1].data[0].weights_le, "<f4")
    np.testing.assert_allclose(weights[1:], -(2 * expected[1:] + 1), rtol=1e-6)
    assert weights[0] == 0
    assert result.metrics["loss:sum"] == pytest.approx(0.640625)
    assert "surrogate_loss:sum" in result.metrics
    np.testing.assert_allclose(result.results[0].logprobs, expected)
    assert result.step == 2


def test_custom_losses_see_ragged_targets_flat(sent: Sent, client: weft.Client) -> None:
    adapter = client.create_adapter("a")
    datum = weft.Datum([7, 8, 9], [[3, 4], [], [5]], [[0.5, 0.0], [], [2.0]])

    def loss_fn(logprobs: list[np.ndarray]) -> tuple[float, list[np.ndarray]]:
        assert logprobs[0].shape == (3,)
        return 1.5, [np.array([1, 2, -3], "<f4")]

    result = adapter.forward_backward_custom([datum], loss_fn)
    message = sent[-1].data[0]
    assert np.frombuffer(message.weights_le, "<f4").tolist() == [-1, 0, 3]
    assert message.target_offsets_le == np.array([0, 2, 2, 3], "<u4").tobytes()
    assert result.results[0].logprobs.shape == (3,)
    with pytest.raises(weft.InvalidArgument):
        adapter.forward_backward_custom([datum], lambda _: (0.0, [np.ones(2)]))


def test_torch_loss_differentiates() -> None:
    torch = pytest.importorskip("torch")
    loss_fn = weft.torch_loss(lambda lps: torch.exp(lps[0]).sum())
    logprobs = np.array([-1, -2], "<f4")
    loss, gradients = loss_fn([logprobs, np.array([-3], "<f4")])
    assert loss == pytest.approx(float(np.exp(logprobs).sum()))
    first, second = map(np.asarray, gradients)
    np.testing.assert_allclose(first, np.exp(logprobs), rtol=1e-6)
    np.testing.assert_allclose(second, [0])


def test_a_loss_is_traced_for_the_server(sent: Sent, client: weft.Client) -> None:
    torch = pytest.importorskip("torch")

    def loss(logprobs: Any, a: Any, b: Any) -> tuple[Any, dict[str, Any]]:
        mixed = torch.clamp(logprobs[..., 1:], min=-float("inf")) * a.to(torch.float32)
        return torch.cat([mixed, mixed]).sum() * b, {"custom/b:sum": b}

    traced = weft.trace_loss(loss, a=1, b=0)
    assert list(traced.inputs.items()) == [("logprobs", 1), ("a", 1), ("b", 0)]
    nodes = {node["name"]: node for node in json.loads(traced.graph)["nodes"]}
    assert nodes["getitem"]["target"] == "operator.getitem"
    index = {"tuple": [{"ellipsis": True}, {"slice": [1, None, None]}]}
    assert nodes["getitem"]["args"] == [{"ref": "logprobs"}, index]
    assert nodes["clamp"]["kwargs"] == {"min": {"float": "-inf"}}
    assert nodes["to"]["args"] == [{"ref": "a"}, {"dtype": "float32"}]
    assert nodes["cat"]["args"] == [[{"ref": "mul"}, {"ref": "mul"}]]
    adapter = client.create_adapter("a")
    datum = weft.Datum([1, 2, 3], [2, 3, 4], custom_inputs={"a": [1, 2], "b": 0.5})
    adapter.forward_backward([datum], "custom", custom_loss=traced)
    request = sent[-1]
    assert request.loss.custom_loss.graph == traced.graph
    named = [(one.name, one.rank) for one in request.loss.custom_loss.inputs]
    assert named == list(traced.inputs.items())
    a, b = (request.data[0].custom_inputs[name] for name in ("a", "b"))
    assert (list(a.shape), a.ints_le) == ([2], np.array([1, 2], "<i8").tobytes())
    assert (list(b.shape), b.floats_le) == ([], np.array(0.5, "<f4").tobytes())
    assert not datum.with_weights([1, 1, 1]).custom_inputs
    for wrong in (
        lambda: weft.trace_loss(loss, a=1),
        lambda: weft.trace_loss(lambda a: (a, {}), a=1),
        lambda: weft.trace_loss(lambda logprobs: (1 if logprobs > 0 else 2, {})),
        lambda: weft.Datum([1], [2], custom_inputs={"a": [[[1]]]}),
        lambda: weft.Datum([1], [2], custom_inputs={"a": "text"}),
    ):
        with pytest.raises(weft.InvalidArgument):
            wrong()


def test_losses_are_traced_in_several_threads() -> None:
    torch = pytest.importorskip("torch")

    def loss(logprobs: Any, a: Any) -> tuple[Any, dict[str, Any]]:
        total = logprobs
        for _ in range(20):
            total = torch.exp(total) * a
        return total.sum(), {}

    with ThreadPoolExecutor(8) as pool:
        traced = list(pool.map(lambda _: weft.trace_loss(loss, a=1), range(200)))
    assert len({one.graph for one in traced}) == 1
