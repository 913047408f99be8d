"""Compares losses with a teacher, and their gradients, with autograd through peft over
the whole vocabulary."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import tolerance
import torch
from batching import together
from conftest import SHORT_SMOLLM2, model_folder
from reference import mixed_shapes
from test_gradients import assert_gradients
from texts import next_token, random_tokens, sequences

TEMPERATURE = 0.8
BETA = 0.3


def divergences(loss: str, lp: torch.Tensor, lq: torch.Tensor) -> torch.Tensor:
    """Returns the divergence of each row, [N]. lp: the student's log-probabilities,
    [N, V]. lq: the teacher's."""
    p, q = lp.exp(), lq.exp()
    if loss == "forward_kl":
        return (q * (lq - lp)).sum(-1)
    if loss == "reverse_kl":
        return (p * (lp - lq)).sum(-1)
    lm = (BETA * q + (1 - BETA) * p).log()
    return (BETA * q * (lq - lm) + (1 - BETA) * p * (lp - lm)).sum(-1)


def all_logprobs(model: Any, tokens: Any) -> torch.Tensor:
    """Returns the log-probabilities at TEMPERATURE, [N, V]."""
    ids = torch.tensor(np.asarray(tokens, dtype=np.int64))
    logits = model(ids[None], use_cache=False).logits[0].double()
    return torch.log_softmax(logits / TEMPERATURE, dim=-1)


def teacher_logprobs(
    reference: Any, folder: Path | None, data: list[Any]
) -> list[torch.Tensor]:
    """Returns the teacher's log-probabilities for each datum, [N, V], at the places of
    the datum's tokens; zeros where the teacher has no place. folder: None is the base
    model."""

    def of(model: Any) -> list[torch.Tensor]:
        rows = []
        for datum in data:
            own = datum.teacher_tokens is None
            tokens = datum.tokens if own else datum.teacher_tokens
            scores = all_logprobs(model, tokens).detach()
            length = len(datum.tokens)
            missing = max(0, length - len(scores))
            padded = torch.cat([torch.zeros(missing, scores.shape[1]), scores])
            rows.append(padded[-length:])
        return rows

    if folder is None:
        return of(reference.model)
    with reference.adapter(folder) as adapted:
        return of(adapted.model)


def reply_datum(prompt: list[int], reply: list[int]) -> Any:
    """Returns a datum of which the reply is compared, with weights that differ."""
    datum = next_token([*prompt, *reply])
    weights = np.zeros(len(datum.tokens), dtype=np.float32)
    weights[len(prompt) - 1 :] = 0.5 + 0.25 * (np.arange(len(reply)) % 4)
    return datum.with_weights(weights)


def student_data(kind: str, vocab: int) -> list[Any]:
    """Returns a datum of which every token is compared, and one whose teacher reads a
    longer prompt."""
    tokens = sequences(kind, model_folder(kind), vocab)
    reply, told = random_tokens(vocab, 9, 7), random_tokens(vocab, 21, 8)
    moved = reply_datum(random_tokens(vocab, 6, 9), reply)
    return [next_token(tokens[0]), moved.with_teacher_tokens([*told, *reply[:-1]])]


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        ("forward_kl", "llama-tied"),
        ("reverse_kl", "gemma2"),
        ("js", "qwen3"),
        ("forward_kl", SHORT_SMOLLM2),
    ],
)
def test_an_adapter_and_the_base_teach_in_one_batch(
    loss: str, kind: str, both_for: Any, unique: Any, tmp_path: Any
) -> None:
    """Student, teacher and lm_head have LoRA of different ranks. gemma2 has a
    softcap."""
    import weft

    reference, daemon = both_for(kind)
    check_distillation(loss, kind, daemon, reference, unique, tmp_path, weft.Teacher)


def check_distillation(
    loss: str,
    kind: str,
    daemon: Any,
    reference: Any,
    unique: Any,
    tmp_path: Path,
    teacher_type: Any,
) -> None:
    """Trains two students at once: one learns from an adapter, the other from the base
    model. Compares losses, log-probabilities and gradients."""
    small, wide, large = (
        reference.make_adapter(tmp_path / str(i), shape, seed=70 + i)
        for i, shape in enumerate(mixed_shapes(kind))
    )
    data = student_data(kind, reference.vocab)
    options: dict[str, Any] = {"temperature": TEMPERATURE}
    if loss == "js":
        options["beta"] = BETA
    with daemon.client() as client:
        teacher = client.import_adapter(unique("teacher"), large)
        students = [client.import_adapter(unique("student"), f) for f in (wide, small)]
        teachers = [teacher_type(teacher.id), teacher_type()]
        replies = together(
            client,
            [
                partial(s.forward_backward, data, loss, teacher=t, **options)
                for s, t in zip(students, teachers, strict=True)
            ],
        )
        measured = [checkpoints.gradients(daemon, student) for student in students]
    for student, source, reply, gradients in zip(
        (wide, small), (large, None), replies, measured, strict=True
    ):
        constants = teacher_logprobs(reference, source, data)
        with reference.adapter(student) as adapted:
            total = 0.0
            for datum, lq, result in zip(data, constants, reply.results, strict=True):
                lp = all_logprobs(adapted.model, datum.tokens)
                weights = torch.ones(len(lp), dtype=torch.float64)
                if datum.weights is not None:
                    weights = torch.tensor(datum.weights, dtype=torch.float64)
                wanted = divergences(loss, lp, lq)
                (weights * wanted).sum().backward()
                scored = weights.numpy() != 0
                losses = (weights * wanted).detach().numpy() * scored
                total += float(losses.sum())
                # A divergence is a mean of logprobs' differences.
                tolerance.assert_near(result.losses, losses)
                index = torch.tensor(datum.targets.astype(np.int64))[:, None]
                logprobs = lp.detach().gather(1, index)[:, 0].numpy() * scored
                tolerance.assert_near(result.logprobs, logprobs)
            assert_gradients(gradients, adapted.gradients())
        assert reply.metrics["loss:sum"] == pytest.approx(total, rel=1e-4)


def test_a_student_reaches_its_teacher(daemon_for: Any, unique: Any) -> None:
    """The divergence falls to a fraction. That of equal models is zero."""
    import weft

    kind = "llama-tied"
    data = [next_token(random_tokens(320, 40, seed)) for seed in range(4)]
    with daemon_for(kind).client() as client:
        teacher = client.create_adapter(unique("teacher"), rank=4, seed=3)
        for _ in range(4):
            teacher.forward_backward(data)
            teacher.optim_step(learning_rate=3e-2)
        student = client.create_adapter(unique("student"), rank=4, seed=4)
        of_teacher = weft.Teacher(teacher.id)
        before = student.score(data, "forward_kl", teacher=of_teacher)
        for _ in range(30):
            student.forward_backward(data, "forward_kl", teacher=of_teacher)
            student.optim_step(learning_rate=1e-2)
        after = student.score(data, "forward_kl", teacher=of_teacher)
        assert after.metrics["kl:mean"] < 0.25 * before.metrics["kl:mean"]
        same = teacher.score(data, "reverse_kl", teacher=of_teacher)
        assert abs(same.metrics["kl:mean"]) <= tolerance.LOGPROBS
