"""Tests teachers of distillation over restarts, moves and deletions."""

from __future__ import annotations

from typing import Any

import pytest
from durable import VOCAB, Durable, batch, image
from texts import next_token, random_tokens

import weft

SMALL_SNAPSHOTS = ("--snapshot-log-bytes", "1000")


def learn(adapter: Any, seed: int) -> None:
    adapter.forward_backward(batch(seed))
    adapter.optim_step(learning_rate=1e-2)


def told(seed: int) -> Any:
    """Returns a datum whose teacher reads another prompt before the same tokens."""
    tokens = random_tokens(VOCAB, 24, seed)
    datum = next_token(tokens)
    return datum.with_teacher_tokens(
        [*random_tokens(VOCAB, 11, seed + 1), *tokens[:-1]]
    )


def distil_in_turn(client: Any) -> None:
    """Lets a learn from b, from its own snapshot, from itself and from the base, while
    b learns as well."""
    a, b = client.adapter("a"), client.adapter("b")
    for seed in range(3):
        learn(b, seed)
        a.forward_backward(batch(seed), "forward_kl", teacher=weft.Teacher("b"))
        learn(b, 10 + seed)
        if seed == 0:
            b.snapshot("s")
            a.snapshot("own")
        a.forward_backward(batch(seed), "reverse_kl", teacher=weft.Teacher("b", "s"))
        a.forward_backward([told(seed)], "js", teacher=weft.Teacher("a"), beta=0.4)
        a.forward_backward(batch(seed), "js", teacher=weft.Teacher("a", "own"))
        a.forward_backward(batch(seed), "forward_kl", teacher=weft.Teacher())
        a.optim_step(learning_rate=1e-2)
    a.forward_backward(batch(9), "forward_kl", teacher=weft.Teacher("b"))


@pytest.mark.parametrize("flags", [(), SMALL_SNAPSHOTS])
def test_a_replay_finds_every_teacher_as_it_was(
    flags: tuple[str, ...], durable: Durable
) -> None:
    daemon = durable.start("--max-resident-adapters", "2", *flags)
    with daemon.client() as client:
        for name, rank in (("a", 4), ("b", 8)):
            client.create_adapter(name, rank=rank, seed=rank)
        distil_in_turn(client)
        before = [image(durable, name) for name in "ab"]
    # A teacher takes no slot of the device.
    durable.restart("--max-resident-adapters", "1", *flags)
    assert [image(durable, name) for name in "ab"] == before
    with durable.daemon.client() as client:
        a = client.adapter("a")
        a.forward_backward(batch(7), "reverse_kl", teacher=weft.Teacher("b", "s"))


def test_a_replay_survives_the_end_of_a_teacher(durable: Durable) -> None:
    """The log has the teacher's end, too, behind the steps that read it."""
    daemon = durable.start()
    with daemon.client() as client:
        a = client.create_adapter("a", rank=4, seed=1)
        b = client.create_adapter("b", rank=4, seed=2)
        learn(b, 1)
        b.snapshot("s")
        a.forward_backward(batch(1), "forward_kl", teacher=weft.Teacher("b", "s"))
        b.release_snapshot("s")
        a.forward_backward(batch(2), "forward_kl", teacher=weft.Teacher("b"))
        client.delete_adapter("b")
        a.optim_step(learning_rate=1e-2)
        with pytest.raises(weft.NotFound, match="'b' does not exist"):
            a.forward_backward(batch(2), "forward_kl", teacher=weft.Teacher("b"))
        # An adapter of the same name is another one.
        learn(client.create_adapter("b", rank=8, seed=9), 3)
        a.forward_backward(batch(3), "forward_kl", teacher=weft.Teacher("b"))
        before = image(durable, "a")
    durable.restart()
    assert image(durable, "a") == before


def test_a_teacher_of_durability_memory_is_refused_by_what_must_be_repeated(
    durable: Durable,
) -> None:
    with durable.start().client() as client:
        a = client.create_adapter("a", rank=4, seed=1)
        memory = client.create_adapter("m", rank=4, seed=2, durability="memory")
        learn(memory, 1)
        with pytest.raises(weft.FailedPrecondition, match="durability memory"):
            a.forward_backward(batch(1), "js", teacher=weft.Teacher("m"))
        # A score is not repeated, and neither is a step of the other adapter.
        score = a.score(batch(1), "js", teacher=weft.Teacher("m"))
        memory.forward_backward(batch(1), "js", teacher=weft.Teacher("a"))
        a.forward_backward(batch(1))
        before = image(durable, "a")
    assert score.metrics["kl:mean"] > 0
    durable.restart()
    assert image(durable, "a") == before


def test_a_teacher_off_the_device_teaches_the_same(durable: Durable) -> None:
    """The only slot is the student's, so the teacher is on the host or on disk."""
    results: list[list[list[float]]] = []
    for flags in (
        ("--max-resident-adapters", "3"),
        ("--max-resident-adapters", "1", "--adapter-host-bytes", "1000000000"),
        ("--max-resident-adapters", "1", "--adapter-host-bytes", "0"),
    ):
        daemon = durable.start(*flags)
        with daemon.client() as client:
            names = [f"{name}{len(results)}" for name in "abc"]
            a, b, c = (client.create_adapter(n, rank=4, seed=3) for n in names)
            for seed in range(2):
                learn(b, seed)
            b.snapshot("s")
            learn(b, 5)
            learn(c, 5)
            seen = []
            for snapshot in (None, "s"):
                teacher = weft.Teacher(b.id, snapshot)
                reply = a.forward_backward(batch(2), "forward_kl", teacher=teacher)
                seen += [result.losses.tolist() for result in reply.results]
            # The teacher goes on to learn, and the copy that taught stays as it was.
            learn(b, 6)
            a.optim_step(learning_rate=1e-2)
            reply = a.forward_backward(
                batch(2), "forward_kl", teacher=weft.Teacher(b.id)
            )
            seen += [result.losses.tolist() for result in reply.results]
        results.append(seen)
        daemon.kill()
    assert results[0] == results[1] == results[2]
    assert results[0][0] != results[0][3]
