"""Turns a record of text into token ids, and says which of them are learnt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from weft.data.chat import Message
from weft.data.forms import as_messages, text_field
from weft.data.sources import Record
from weft.data.tokenizer import ModelTokenizer
from weft.datum import Datum
from weft.errors import InvalidArgument

LossOn = Literal["all", "last"]
Truncate = Literal["end", "start", "never"]
CHATS = ("messages", "conversations")
# Fields that a prompt leaves out.
ANSWERS = ("output", "text", "completion", "chosen", "rejected")


@dataclass(frozen=True)
class Example:
    """A sequence of tokens [N], and which of them are learnt [N].

    The first token is never learnt, because no token comes before it.
    """

    tokens: list[int]
    learnt: list[bool]

    @property
    def num_learnt(self) -> int:
        """Returns the number of tokens that the loss counts."""
        return sum(self.learnt[1:])

    @property
    def prompt_length(self) -> int:
        """Returns the number of tokens before the first learnt one.

        Raises InvalidArgument if a later token is not learnt, as in a chat of several
        turns.
        """
        first = self.learnt.index(True) if any(self.learnt) else len(self.tokens)
        if not all(self.learnt[first:]):
            raise InvalidArgument("learns several stretches: no single prompt_length")
        return first

    def datum(self, weight: float = 1.0) -> Datum:
        """Returns training data of N - 1 positions; each token predicts the next one.

        weight: the weight of each learnt token. The loss is the weighted sum over the
        tokens.
        """
        weights = np.asarray(self.learnt[1:], dtype="<f4") * np.float32(weight)
        return Datum(self.tokens[:-1], self.tokens[1:], weights)


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, of which the first is preferred."""

    chosen: Example
    rejected: Example


class Encoder:
    """Turns records into examples. Call it with one record.

    | record | learnt |
    | --- | --- |
    | {"text"} | the whole text |
    | {"prompt", "completion"} | the completion |
    | {"messages"} (and "tools") | the assistant's turns, if "weight" is not 0 |
    | {"conversations"} (ShareGPT) | the same, of "from" and "value" |
    | {"instruction", "output"} (and "input": Alpaca), without fields of the other
    forms | the output |
    | {"tokens"} (and "prompt_length") | the tokens after the prompt |
    | {"prompt", "chosen", "rejected"} | both answers, as a Pair |

    A prompt, a completion and an answer may be texts or lists of messages. loss_on:
    learns "all" turns of the assistant in "messages", or the "last". eos: ends an
    example with the model's end of sequence, except {"tokens"} and a chat that does
    not end with the assistant. max_tokens: the most tokens of an example. truncate: a
    longer example loses its "end" or its "start", or is refused ("never"). The
    constructor raises InvalidArgument for invalid options. A call raises
    InvalidArgument for a record with nothing to learn.
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        *,
        loss_on: LossOn = "all",
        eos: bool = True,
        max_tokens: int | None = None,
        truncate: Truncate = "end",
    ) -> None:
        if eos and not tokenizer.eos_ids:
            raise InvalidArgument(
                "the model folder names no end of sequence: say that data has none"
            )
        for value, kind in ((loss_on, LossOn), (truncate, Truncate)):
            if value not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise InvalidArgument(f"{value!r}: must be one of {known}")
        if max_tokens is not None and max_tokens < 2:
            raise InvalidArgument(f"max_tokens {max_tokens}: must be at least 2")
        self._tokenizer = tokenizer
        self._loss_on = loss_on
        self._eos = eos
        self._max_tokens = max_tokens
        self._truncate = truncate

    def __call__(self, record: Record) -> Example | Pair:
        """Returns the record's example, or its pair."""
        if "chosen" in record or "rejected" in record:
            return self.pair(record)
        return self.example(record)

    def example(self, record: Record) -> Example:
        """Returns the record's example. Raises InvalidArgument for the record of a
        pair, and for a record of no known form."""
        if record.get("label") is False:  # KTO's records have answers of both kinds.
            raise InvalidArgument('"label" is false: this answer is not to be learnt')
        record = as_messages(record)
        if "messages" in record:
            messages = _messages(record, "messages")
            return self._chat(messages, record, self._loss_on == "last")
        if "prompt" in record and "completion" in record:
            return self._answer(record, "completion")
        if "text" in record:
            tokens = self._tokenizer.encode(text_field(record, "text"))
            return self._ended(tokens, [True] * len(tokens))
        if "tokens" in record:
            return self._from_tokens(record)
        raise InvalidArgument(
            'a record needs "messages", "prompt" and "completion", "text", "tokens", '
            '"conversations", "instruction" and "output", or "prompt", "chosen" and '
            f'"rejected"; it has {sorted(record)}'
        )

    def pair(self, record: Record) -> Pair:
        """Returns the record's two answers. Raises InvalidArgument if an answer is
        missing, or if both are equal, perhaps only within max_tokens."""
        pair = Pair(self._answer(record, "chosen"), self._answer(record, "rejected"))
        if pair.chosen == pair.rejected:
            raise InvalidArgument('"chosen" and "rejected" are equal: nothing to learn')
        return pair

    def prompt(self, record: Record) -> list[int]:
        """Returns the token ids of a prompt, [P].

        record: {"messages"}, {"conversations"}, {"instruction"} (and "input"), or
        {"prompt"} with a text or a list of messages. Raises InvalidArgument for
        anything else.
        """
        given = record.keys()
        record = as_messages({k: v for k, v in record.items() if k not in ANSWERS})
        name = "messages" if "messages" in record else "prompt"
        if name == "prompt" and isinstance(record.get("prompt"), str):
            return self._tokenizer.encode(text_field(record, "prompt"))
        messages = _messages(record, name)
        name = next((one for one in CHATS if one in given), name)
        if messages[-1].get("role") == "assistant":
            raise InvalidArgument(
                f'"{name}" ends with the assistant, so the prompt would hold the '
                "answer; leave out the last message"
            )
        return self._tokenizer.chat_prompt(messages, tools=_tools(record))

    def _answer(self, record: Record, name: str) -> Example:
        """Returns an example in which record[name] is learnt and follows
        record["prompt"]."""
        prompt, answer = record.get("prompt"), record.get(name)
        if isinstance(prompt, str) and isinstance(answer, list):
            # UltraFeedback's answers begin with the prompt.
            messages = _messages(record, name)
            if prompt not in [message.get("content") for message in messages]:
                raise InvalidArgument(
                    f'"prompt" is a text and "{name}" a list of messages without it; '
                    "write both as texts, or both as messages"
                )
            return self._chat(messages, record, True)
        if isinstance(prompt, list) and isinstance(answer, str):
            raise InvalidArgument(
                f'"prompt" is a list of messages and "{name}" a text; write both as '
                "texts, or both as messages"
            )
        if str in (type(record.get("prompt")), type(record.get(name))):
            text = text_field(record, "prompt")
            prompt = self._tokenizer.encode(text)
            tokens = self._tokenizer.encode(text + text_field(record, name))
            # Encodes the prompt and the answer together, because some tokenizers add
            # a space to an answer that is encoded alone. But sampling continues the
            # prompt's own tokens. So if the joint encoding changes the prompt's
            # tokens, encodes the answer alone.
            if tokens[: len(prompt)] != prompt:
                answer = self._tokenizer.encode(text_field(record, name), special=False)
                tokens = prompt + answer
            learnt = [position >= len(prompt) for position in range(len(tokens))]
            return self._ended(tokens, learnt)
        before = _messages(record, "prompt") if "prompt" in record else []
        return self._chat([*before, *_messages(record, name)], record, True)

    def _chat(self, messages: Sequence[Message], record: Record, last: bool) -> Example:
        tokens, learnt = self._tokenizer.chat(messages, tools=_tools(record), last=last)
        # Tokens after the last learnt one have no effect.
        while learnt and not learnt[-1]:
            tokens.pop()
            learnt.pop()
        final = messages[-1]
        if final.get("role") != "assistant" or final.get("weight", 1) == 0:
            return self._checked(tokens, learnt)
        return self._ended(tokens, learnt)

    def _from_tokens(self, record: Record) -> Example:
        tokens, length = record["tokens"], record.get("prompt_length", 0)
        if not isinstance(tokens, list) or any(type(t) is not int for t in tokens):
            raise InvalidArgument('"tokens" is not a list of token ids')
        most = self._tokenizer.vocab_size
        for place, token in enumerate(tokens):
            if not 0 <= token < most:
                raise InvalidArgument(
                    f'"tokens"[{place}] is {token}, must be a token id in [0, {most})'
                )
        if not isinstance(length, int) or not 0 <= length <= len(tokens):
            raise InvalidArgument(f'"prompt_length" is not in 0..{len(tokens)}')
        learnt = [position >= length for position in range(len(tokens))]
        return self._checked(tokens, learnt)

    def _ended(self, tokens: list[int], learnt: list[bool]) -> Example:
        ends = self._tokenizer.eos_ids
        if self._eos and (not tokens or tokens[-1] not in ends):
            tokens, learnt = [*tokens, ends[0]], [*learnt, True]
        return self._checked(tokens, learnt)

    def _checked(self, tokens: list[int], learnt: list[bool]) -> Example:
        most = self._max_tokens
        if most is not None and len(tokens) > most:
            if self._truncate == "never":
                raise InvalidArgument(f"{len(tokens)} tokens > max_tokens {most}")
            kept = slice(-most, None) if self._truncate == "start" else slice(most)
            tokens, learnt = tokens[kept], learnt[kept]
        example = Example(tokens, learnt)
        if example.num_learnt == 0:
            within = "" if most is None else f" within max_tokens {most}"
            raise InvalidArgument(f"nothing to learn{within}")
        return example


def _messages(record: Record, name: str) -> list[Message]:
    value = record.get(name)
    if not isinstance(value, list) or not value:
        raise InvalidArgument(f'"{name}" is not a list of messages')
    return [
        _message(message, f"{name}[{index}]") for index, message in enumerate(value)
    ]


def _message(message: object, where: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidArgument(f"{where} is not an object with a role")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise InvalidArgument(f"{where}: no content")
    weight = message.get("weight", 0)
    if weight != 0 and (weight != 1 or message["role"] != "assistant"):
        raise InvalidArgument(
            f"{where}: weight {weight!r}; must be 0 or, for the assistant, 1"
        )
    if not isinstance(content, list):
        return message
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        raise InvalidArgument(f"{where}: content has a part that is not a text")
    return {**message, "content": "\n".join(map(str, texts))}


def _tools(record: Record) -> Sequence[Message] | None:
    value = record.get("tools")
    if value is not None and not isinstance(value, list):
        raise InvalidArgument('"tools" is not a list')
    return value
