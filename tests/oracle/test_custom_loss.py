"""Compares the operations of custom losses with PyTorch in float64, in value and
gradient, and tries graphs that fail when they run."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from daemon import processor_seconds
from random_losses import random_loss

import weft

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("WEFT_BUILD_DIR", ROOT / "build" / "cpu"))
README = ROOT / "server" / "tinker" / "README.md"
RANDOM_LOSSES = 150
SHAPES = 40  # The numbers of targets that are tried of each operation.
# A result goes through at most some 40 roundings of float32, each of at most
# 2^-24 of the largest value on the way, which is below 64 here.
TOLERANCE = 40 * 2**-24 * 64

T = Any  # A tensor, or what torch.fx has in its place.
LOGPROBS = [-0.5, -1.25, -2.0, -0.1, -3.0, -0.75]
FLOATS = [0.5, 1.5, -0.25, 2.0, 1.0, 0.3]
INTS = [2, 0, 5, 3, 3, 1]

# An expression for each operation, from logprobs x [6], reals y [6] and integers
# i [6]. Its name is before the first blank.
OPERATIONS: dict[str, Callable[[T, T, T], Any]] = {
    "abs": lambda x, y, i: abs(x),
    "atan": lambda x, y, i: torch.atan(x),
    "bitwise_not": lambda x, y, i: ~(x > y),
    "ceil": lambda x, y, i: torch.ceil(x),
    "clone": lambda x, y, i: x.clone(),
    "contiguous": lambda x, y, i: x.view(2, -1).t().contiguous(),
    "cos": lambda x, y, i: torch.cos(x),
    "erf": lambda x, y, i: torch.erf(x),
    "exp": lambda x, y, i: torch.exp(x),
    "exp method": lambda x, y, i: x.exp(),
    "exp2": lambda x, y, i: torch.exp2(x),
    "expm1": lambda x, y, i: torch.expm1(x),
    "floor": lambda x, y, i: torch.floor(x) + math.floor(x.shape[0] / 4),
    "isfinite": lambda x, y, i: torch.isfinite(x),
    "isinf": lambda x, y, i: torch.isinf(x),
    "isnan": lambda x, y, i: torch.isnan(x),
    "log": lambda x, y, i: torch.log(-x),
    "log of a number": lambda x, y, i: x * math.log(x.shape[0]),
    "log10": lambda x, y, i: torch.log10(-x),
    "log1p": lambda x, y, i: torch.log1p(-x),
    "log2": lambda x, y, i: torch.log2(-x),
    "log_sigmoid": lambda x, y, i: F.logsigmoid(x),
    "logical_not": lambda x, y, i: torch.logical_not(x > y),
    "nan_to_num": lambda x, y, i: torch.nan_to_num(x, nan=0.0, posinf=1.0),
    "neg": lambda x, y, i: -x,
    "positive": lambda x, y, i: +x,
    "reciprocal": lambda x, y, i: 2 / x,
    "reciprocal function": lambda x, y, i: torch.reciprocal(x),
    "relu": lambda x, y, i: F.relu(x + 1),
    "round": lambda x, y, i: torch.round(x),
    "rsqrt": lambda x, y, i: torch.rsqrt(-x),
    "sigmoid": lambda x, y, i: torch.sigmoid(x),
    "sign": lambda x, y, i: torch.sign(x + 1),
    "sin": lambda x, y, i: torch.sin(x),
    "softplus": lambda x, y, i: F.softplus(x, beta=2),
    "sqrt": lambda x, y, i: torch.sqrt(-x),
    "sqrt of a number": lambda x, y, i: x / math.sqrt(x.numel()),
    "square": lambda x, y, i: torch.square(x),
    "tanh": lambda x, y, i: torch.tanh(x),
    "trunc": lambda x, y, i: torch.trunc(x),
    "add": lambda x, y, i: torch.add(x, y, alpha=2) + 1 + i,
    "bitwise_and": lambda x, y, i: (x > -1) & (y > 0),
    "bitwise_or": lambda x, y, i: (x > -1) | (y > 0),
    "bitwise_xor": lambda x, y, i: (x > -1) ^ (y > 0),
    "clamp": lambda x, y, i: torch.clamp(x, -1.0, max=-0.2),
    "clamp tensors": lambda x, y, i: x.clamp(min=-y.abs() - 0.3),
    "clamp_max": lambda x, y, i: x.clamp_max(-1),
    "clamp_min": lambda x, y, i: torch.clamp_min(x, -1.5),
    "clip": lambda x, y, i: torch.clip(x, -2, -0.3),
    "div": lambda x, y, i: x / y + y / 4 + x / x.shape[0],
    "div rounded": lambda x, y, i: torch.div(i, 2, rounding_mode="floor"),
    "eq": lambda x, y, i: i == 3,
    "floor_divide": lambda x, y, i: i // 2 + x.shape[0] // 4,
    "ge": lambda x, y, i: torch.ge(i, 3),
    "gt": lambda x, y, i: x > y - 2,
    "le": lambda x, y, i: i <= 3,
    "lerp": lambda x, y, i: torch.lerp(x, y, 0.3),
    "logaddexp": lambda x, y, i: torch.logaddexp(x, y),
    "logical_and": lambda x, y, i: torch.logical_and(x > -1, y > 0),
    "logical_or": lambda x, y, i: torch.logical_or(x > -1, y > 0),
    "logical_xor": lambda x, y, i: torch.logical_xor(x > -1, y > 0),
    "lt": lambda x, y, i: x < -1,
    "masked_fill": lambda x, y, i: x.masked_fill(i == 3, 0.5),
    "masked_select": lambda x, y, i: torch.masked_select(x, i > 2),
    "maximum": lambda x, y, i: torch.maximum(x, -y),
    "minimum": lambda x, y, i: torch.minimum(x, -y),
    "mul": lambda x, y, i: 3 * x * y * i,
    "ne": lambda x, y, i: i != 3,
    "pow": lambda x, y, i: x**2 + 2**x + x * x.shape[0] ** -0.5,
    "pow of tensors": lambda x, y, i: torch.pow(-x, y),
    "remainder": lambda x, y, i: i % 3 + x % 2 + x.shape[0] % 4,
    "sub": lambda x, y, i: 1 - x - y,
    "where": lambda x, y, i: torch.where(i > 2, x, 0.0),
    "xlogy": lambda x, y, i: torch.xlogy(y, -x),
    "all": lambda x, y, i: torch.all(x < y) + (x < -1).view(2, -1).all(dim=1),
    "amax": lambda x, y, i: torch.amax(x.view(2, -1), dim=(0, 1)),
    "amin": lambda x, y, i: x.view(2, -1).amin(1, keepdim=True),
    "any": lambda x, y, i: (x < -1).view(2, -1).any(-1) + (x > 0).any(),
    "argmax": lambda x, y, i: x * torch.argmax(x),
    "argmin": lambda x, y, i: x * x.argmin(dim=0),
    "argsort": lambda x, y, i: x * torch.argsort(x, descending=True),
    "count_nonzero": lambda x, y, i: x * torch.count_nonzero(i),
    "cumsum": lambda x, y, i: torch.cumsum(x, dim=0),
    "dot": lambda x, y, i: torch.dot(x, x),
    "log_softmax": lambda x, y, i: F.log_softmax(x, dim=-1),
    "logcumsumexp": lambda x, y, i: torch.logcumsumexp(x, 0),
    "logsumexp": lambda x, y, i: torch.logsumexp(x, dim=0),
    "max": lambda x, y, i: torch.max(x) + torch.max(x, -y),
    "max over a dimension": lambda x, y, i: torch.max(x.view(2, -1), 1).values,
    "mean": lambda x, y, i: x.mean() + x.view(2, -1).mean(0),
    "median": lambda x, y, i: x.view(2, -1).median(dim=1)[0] + x.median(),
    "min": lambda x, y, i: torch.min(x, dim=0).indices * x + x.min(),
    "prod": lambda x, y, i: torch.prod(x) + x.view(2, -1).prod(1),
    "softmax": lambda x, y, i: torch.softmax(x, -1) + F.softmax(x, dim=0),
    "sort": lambda x, y, i: torch.sort(x, descending=True)[0] * y,
    "std": lambda x, y, i: torch.std(x) + x.std(dim=0, unbiased=False),
    "sum": lambda x, y, i: x.view(2, -1).sum(1, True) + x.sum() + i.sum(),
    "topk": lambda x, y, i: torch.topk(x, 3).values,
    "var": lambda x, y, i: x.var() + torch.var(x, dim=0, correction=0),
    "broadcast_to": lambda x, y, i: torch.broadcast_to(x, (2, x.shape[0])),
    "cat": lambda x, y, i: torch.cat([x, x * y], dim=0),
    "detach": lambda x, y, i: x * x.detach(),
    "expand": lambda x, y, i: x[:, None].expand(-1, 2),
    "expand varargs": lambda x, y, i: x.expand(2, x.shape[0]),
    "expand_as": lambda x, y, i: x.sum().expand_as(y),
    "flatten": lambda x, y, i: torch.flatten(x.view(2, -1)) * y,
    "flip": lambda x, y, i: torch.flip(x, [0]) * y,
    "gather": lambda x, y, i: torch.gather(x, 0, i) * y,
    "narrow": lambda x, y, i: x.narrow(0, 1, 3),
    "permute": lambda x, y, i: x.view(2, -1).permute(1, 0) * y.view(-1, 2),
    "reshape": lambda x, y, i: x.reshape(-1, 2) * y.reshape([-1, 2]),
    "roll": lambda x, y, i: torch.roll(x, 1) * y,
    "scatter_add": lambda x, y, i: torch.zeros_like(x).scatter_add(0, i, x),
    "select": lambda x, y, i: x.select(0, 2),
    "squeeze": lambda x, y, i: x[None].squeeze() * y + x[None].squeeze(0),
    "stack": lambda x, y, i: torch.stack((x, y), 1),
    "t": lambda x, y, i: x.view(2, -1).t() * y.view(2, -1).T,
    "transpose": lambda x, y, i: x.view(2, -1).transpose(0, 1) * y.view(-1, 2),
    "tril": lambda x, y, i: torch.tril(x.view(2, -1)),
    "triu": lambda x, y, i: torch.triu(x.view(2, -1), diagonal=1),
    "unsqueeze": lambda x, y, i: x.unsqueeze(-1) * y[:6],
    "view": lambda x, y, i: x.view(2, -1) * y.view((2, -1)),
    "view_as": lambda x, y, i: x.view_as(y),
    "arange": lambda x, y, i: (
        x * torch.arange(x.shape[0])
        + torch.arange(1, 2 * x.shape[0] + 1, 2, device=x.device)
    ),
    "full": lambda x, y, i: x * torch.full((x.shape[0],), 0.5, device=x.device),
    "full_like": lambda x, y, i: x * torch.full_like(x, 0.5),
    "ones": lambda x, y, i: x + torch.ones(x.shape[0], dtype=x.dtype),
    "ones_like": lambda x, y, i: x + torch.ones_like(i),
    "zeros": lambda x, y, i: x + torch.zeros(x.shape[0], device=x.device),
    "zeros_like": lambda x, y, i: torch.zeros_like(x) - x,
    "bool": lambda x, y, i: x * i.bool(),
    "double": lambda x, y, i: x.double() * y,
    "float": lambda x, y, i: x * i.float(),
    "int": lambda x, y, i: x * y.int(),
    "long": lambda x, y, i: x * (y * 2).long(),
    "to": lambda x, y, i: x * i.to(torch.float32) + y.to("cpu").to(dtype=torch.int64),
    "type_as": lambda x, y, i: i.type_as(x) * x,
    "dim": lambda x, y, i: x * x.dim() + x.ndim,
    "getattr": lambda x, y, i: x / x.shape[0],
    "getitem": lambda x, y, i: x[1:4] * x[-3:] + x[0],
    "getitem by integers": lambda x, y, i: x[i] * y + x[[0, 2]].sum(),
    "getitem by a mask": lambda x, y, i: x[i > 2] * 2,
    "floor_divide of numbers": lambda x, y, i: x.view(x.shape[0] // 2, 2),
    "remainder of numbers": lambda x, y, i: x[: x.shape[0] % 4] * (x.shape[0] % 5),
    "getitem by a mask and integers": lambda x, y, i: x.view(2, -1)[
        x.view(2, -1)[:, 0] < 0, i[3:5] - 3
    ],
    "getitem of a matrix": lambda x, y, i: x.view(2, -1)[..., 1:][:, i[3:5] - 3, None],
    "numel": lambda x, y, i: x / x.numel() + torch.numel(y),
    "size": lambda x, y, i: x / x.size(0) + x.size()[0] + x.view(2, -1).size(dim=1),
}


def traced(loss: Callable[..., Any]) -> dict[str, Any]:
    graph: dict[str, Any] = json.loads(weft.trace_loss(loss, y=1, i=1).graph)
    return graph


class Runner:
    """Asks the program loss_graphs."""

    def __init__(self) -> None:
        program = BUILD / "tests" / "oracle" / "loss_graphs"
        self._process = subprocess.Popen(
            [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        listed = subprocess.run(
            [program, "--list"], capture_output=True, text=True, check=True
        )
        self.operations = listed.stdout.split()

    def ask(
        self,
        graph: dict[str, Any],
        *,
        floats: list[float] = FLOATS,
        ints: list[int] = INTS,
        logprobs: list[float] = LOGPROBS,
        width: int = 0,
        backward: bool = True,
    ) -> dict[str, Any]:
        rank = 2 if width else 1
        ask = {
            "graph": graph,
            "inputs": [
                {"name": "logprobs", "rank": rank},
                {"name": "y", "rank": 1},
                {"name": "i", "rank": 1},
            ],
            "logprobs": logprobs,
            "targets_per_token": width,
            "values": {
                "y": {"shape": [len(floats)], "floats": floats},
                "i": {"shape": [len(ints)], "ints": ints},
            },
            "backward": backward,
        }
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(ask) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def peak_bytes(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) << 10

    def seconds(self) -> float:
        return processor_seconds(self._process.pid)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        assert self._process.wait(30) == 0


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    made = Runner()
    yield made
    made.close()


def loss_of(expression: Callable[[T, T, T], Any]) -> Callable[..., Any]:
    """Makes a loss that depends on all values of an expression, and not linearly."""

    def loss(logprobs: T, y: T, i: T) -> tuple[T, dict[str, T]]:
        value = expression(logprobs, y, i)
        value = value.type_as(logprobs)
        total = (value * value).sum() + (logprobs * y).sum()
        return total, {"custom/value:mean": value.sum(), "custom/n:sum": y.sum()}

    return loss


def test_every_operation_is_tried_and_documented(runner: Runner) -> None:
    tried = {name.split(" ")[0] for name in OPERATIONS} | {"logsigmoid"}
    assert tried == set(runner.operations)
    listed = set(README.read_text().split("## Custom losses")[1].split("`"))
    assert set(runner.operations) <= {name for text in listed for name in text.split()}


@pytest.mark.parametrize("name", OPERATIONS)
def test_value_and_gradient_are_those_of_pytorch_in_float64(
    name: str, runner: Runner
) -> None:
    loss = loss_of(OPERATIONS[name])
    answer = runner.ask(traced(loss))
    assert "error" not in answer, answer
    leaf = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    total, metrics = loss(
        leaf, torch.tensor(FLOATS, dtype=torch.float64), torch.tensor(INTS)
    )
    total.backward()
    assert leaf.grad is not None
    assert answer["loss"] == pytest.approx(total.item(), abs=TOLERANCE, rel=TOLERANCE)
    assert answer["gradients"] == pytest.approx(
        leaf.grad.tolist(), abs=TOLERANCE, rel=TOLERANCE
    )
    expected = {key: value.item() for key, value in metrics.items()}
    expected |= {"loss:sum": total.item(), "tokens:sum": len(LOGPROBS)}
    assert answer["metrics"] == pytest.approx(expected, abs=TOLERANCE, rel=TOLERANCE)
    forward = runner.ask(traced(loss), backward=False)
    assert forward["loss"] == answer["loss"]
    assert forward["gradients"] == [0.0] * len(LOGPROBS)


def test_the_bytes_of_each_operation_are_counted() -> None:
    """At least what its tensors take at their peak, and at most 1.5 of that + 1 MiB."""
    graphs = [traced(loss_of(expression)) for expression in OPERATIONS.values()]
    answers = subprocess.run(
        [BUILD / "tests" / "oracle" / "loss_graphs", "--memory", str(SHAPES)],
        input="".join(json.dumps(graph) + "\n" for graph in graphs),
        capture_output=True,
        text=True,
        check=True,
    )
    for name, line in zip(OPERATIONS, answers.stdout.splitlines(), strict=True):
        # A product of many values overflows, which is a text.
        pairs = [taken for taken in json.loads(line) if isinstance(taken, list)]
        assert pairs, name
        for counted, peak in pairs:
            assert peak <= counted <= 1.5 * peak + (1 << 20), name


@pytest.mark.parametrize("targets", [6, 2046])
def test_random_losses_take_what_their_limits_say(targets: int) -> None:
    """What the operating system counts: memory, and the processor's time of one loss.
    At 2,046 targets a loss may have 8 Mi values and 256 MiB."""
    runner = Runner()
    runner.ask(traced(loss_of(OPERATIONS["exp"])))
    before, slowest, outcomes = runner.peak_bytes(), 0.0, Counter[str]()
    for seed in range(RANDOM_LOSSES):
        start = runner.seconds()
        answer = runner.ask(
            traced(random_loss(seed, targets)),
            floats=(FLOATS * targets)[:targets],
            ints=(INTS * targets)[:targets],
            logprobs=(LOGPROBS * targets)[:targets],
        )
        slowest = max(slowest, runner.seconds() - start)
        error = answer.get("error", "")
        is_limit = "the limit for its targets" in error
        outcomes["limit" if is_limit else "other" if error else "computed"] += 1
    most = 256 << 20 if targets > 6 else 2883584
    besides = 128 << 20  # Code that first runs meanwhile, and what malloc keeps.
    assert runner.peak_bytes() - before < most + besides, outcomes
    assert slowest < 1.0, outcomes
    assert outcomes["other"] < RANDOM_LOSSES / 2, outcomes
    assert min(outcomes["limit"], outcomes["computed"]) > RANDOM_LOSSES / 10, outcomes
    runner.close()


def test_soft_targets_are_a_matrix(runner: Runner) -> None:
    def loss(logprobs: T, y: T, i: T) -> tuple[T, dict[str, T]]:
        return (logprobs.sum(1) * y).sum(), {}

    answer = runner.ask(traced(loss), floats=[1.0, 2.0, 3.0], width=2)
    assert answer["gradients"] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


LOWEST = -(2**63)
# Expressions that fail when they run, the node at which they do, and the reason.
FAILURES: dict[str, tuple[Callable[[T, T, T], Any], str, str]] = {
    "shapes": (lambda x, y, i: x * y[:4], "(mul)", "must match"),
    "a gather out of range": (lambda x, y, i: x[i * 2], "(getitem)", "out of"),
    "a dimension": (lambda x, y, i: x.sum(3), "(sum_1)", "Dimension out of range"),
    "arguments": (lambda x, y, i: x.exp(y), "(exp)", "does not take the"),
    "a long list": (lambda x, y, i: x.roll([0] * 9, [0] * 9), "(roll)", "does not"),
    "a sparse gradient": (
        lambda x, y, i: x.gather(0, i, sparse_grad=True),
        "(gather)",
        "has the argument sparse_grad, which is not offered",
    ),
    "an unknown keyword": (
        lambda x, y, i: x.sum(foo=1),
        "(sum_1)",
        "does not take the arguments (Tensor, foo=Int)",
    ),
    "a huge tensor": (
        lambda x, y, i: torch.zeros(10**9, device=x.device) + x.sum(),
        "(zeros)",
        "makes the graph allocate more than 2883584 bytes for this datum",
    ),
    "a huge tensor by overflow": (
        lambda x, y, i: torch.ones([2**40, 2**40], device=x.device) + x.sum(),
        "(ones)",
        "Storage size calculation overflowed",
    ),
    "a huge range": (
        lambda x, y, i: torch.arange(1e15, device=x.device),
        "(arange)",
        "makes the graph allocate more than",
    ),
    "a sum over an empty dimension": (
        lambda x, y, i: torch.zeros([2**28, 0], device=x.device).sum(1),
        "(sum_1)",
        "makes the graph compute more than",
    ),
    "a sum over the empty dimension of a view": (
        lambda x, y, i: x[:0].reshape(0, 2**40).logsumexp(0),
        "(logsumexp)",
        "makes the graph compute more than",
    ),
    "a range of integers with a real step": (
        lambda x, y, i: torch.arange(
            0, 750_000, 1.99, dtype=torch.int64, device=x.device
        ),
        "(arange)",
        "makes the graph allocate more than",
    ),
    "an index of many new dimensions": (
        lambda x, y, i: x[(None,) * 6],
        "(getitem)",
        "has 6 indices for 1 dimensions, must have at most 4 more",
    ),
    "an index of a bool": (lambda x, y, i: x[True], "(getitem)", "has a bool as an"),
    "a huge view": (lambda x, y, i: x[:, None].expand(6, 10**12), "(expand)", "than"),
    "a huge broadcast": (
        lambda x, y, i: x.expand(100, 6).reshape(-1, 1) * x.expand(100, 6).reshape(-1),
        "(mul)",
        "makes the graph compute more than",
    ),
    "a slow broadcast": (
        lambda x, y, i: torch.remainder(x[:, None], y.expand(200, 6).reshape(-1)),
        "(remainder)",
        "makes the graph compute more than",
    ),
    "powers of integers": (
        lambda x, y, i: i.expand(200, 6) ** 3,
        "(pow",
        "makes the graph compute more than",
    ),
    "a huge index": (
        lambda x, y, i: x.expand(2, 6)[torch.arange(20000, device=x.device) * 0],
        "(getitem)",
        "makes the graph compute more than",
    ),
    "five dimensions": (
        lambda x, y, i: x[None, None, None, None],
        "(getitem)",
        "gives a tensor with 5 dimensions, must have at most 4",
    ),
    "the lowest integer": (
        lambda x, y, i: (i * 0 + 2**52) * 2**11 // -1,
        "(floordiv)",
        "has an integer that no quotient may have",
    ),
    "the lowest integer's remainder": (
        lambda x, y, i: (i * 0 + 2**52) * 2**11 % -1,
        "(mod)",
        "has an integer that no quotient may have",
    ),
    "a division by zero": (lambda x, y, i: i // 0, "(floordiv)", "ZeroDivision"),
    "integers of numbers": (
        lambda x, y, i: x * (x.shape[0] * 2**53),
        "(mul)",
        "must be at most 2^53",
    ),
    "a tensor as a number": (
        lambda x, y, i: math.exp(x.sum()),
        "(exp)",
        "takes a number, not a tensor: use the function of torch",
    ),
    "a long slice": (lambda x, y, i: x[:: 2**53], "", ""),
    "an attribute": (lambda x, y, i: x.grad, "(getattr_1)", "asks for grad, must be"),
    "an element": (lambda x, y, i: x * x.shape[1], "(getitem)", "element 1 of 1"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_names_the_node(name: str, runner: Runner) -> None:
    expression, node, reason = FAILURES[name]

    def loss(logprobs: T, y: T, i: T) -> tuple[T, dict[str, T]]:
        return (expression(logprobs, y, i) * 1.0).sum() + logprobs.sum(), {}

    error = runner.ask(traced(loss)).get("error", "")
    if node:
        assert error.startswith("INVALID_ARGUMENT: loss.custom_loss.graph.nodes[")
        assert node in error and reason in error, error
    else:
        assert error == "", error


UNFIT: dict[str, tuple[Callable[[T, T, T], Any], str]] = {
    "no scalar": (lambda x, y, i: x, "has the shape [6], must be a scalar"),
    "one value": (lambda x, y, i: x[:1], "has the shape [1], must be a scalar"),
    "constant": (lambda x, y, i: x.sum().detach(), "a loss without a gradient by"),
    "integer": (lambda x, y, i: x.long().sum(), "a loss without a gradient by"),
    "not finite": (
        lambda x, y, i: torch.log(x).sum(),
        "nodes[3] (log) gives a value that is not finite, or whose derivative is not: "
        "the loss is not finite",
    ),
    "not differentiable": (
        lambda x, y, i: torch.sqrt(x - x).sum(),
        "the gradient of the loss is not finite. A branch that torch.where does not "
        "take counts, too",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_loss_that_trains_nothing_is_refused(name: str, runner: Runner) -> None:
    expression, reason = UNFIT[name]

    def loss(logprobs: T, y: T, i: T) -> tuple[T, dict[str, T]]:
        return expression(logprobs, y, i), {}

    error = runner.ask(traced(loss)).get("error", "")
    assert error.startswith("INVALID_ARGUMENT: ") and reason in error, error


def test_a_sum_of_sizes_does_not_overflow(runner: Runner) -> None:
    def loss(logprobs: T, y: T, i: T) -> tuple[T, dict[str, T]]:
        empty = torch.zeros([0, 2**50], device=logprobs.device)
        return logprobs.sum() + torch.cat([empty]).sum(), {}

    graph = json.loads(json.dumps(traced(loss)).replace('"zeros"', '"z"'))
    (cat,) = (node for node in graph["nodes"] if node["name"] == "cat")
    cat["args"][0] *= 9300
    error = runner.ask(json.loads(json.dumps(graph, separators=(",", ":"))))["error"]
    assert "(cat) makes the graph compute more than 90112 values" in error


def test_metrics_are_scalars(runner: Runner) -> None:
    def loss(logprobs: T, y: T, i: T) -> tuple[T, dict[str, T]]:
        return logprobs.sum(), {"custom/all:sum": y}

    error = runner.ask(traced(loss))["error"]
    assert "nodes[1] (y) has the shape [6], must be a scalar" in error
