"""Turns the records of other programs, Alpaca's, ShareGPT's and OpenAI's, into messages
as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from weft.data.sources import Record
from weft.errors import InvalidArgument

# The speakers of ShareGPT's records. Those of tools are missing, because programs
# disagree about what they mean.
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
}


# Fields of Weft's own forms.
OWN_FIELDS = {"prompt", "completion", "text", "tokens", "chosen", "rejected"}


def as_messages(record: Record) -> Record:
    """Returns the record with "messages" in place of Alpaca's or ShareGPT's fields, or
    the record itself if it has neither, or beside Alpaca's those of a form of Weft.
    Raises InvalidArgument for a field that has no place in messages."""
    if "messages" in record:
        return record
    if "conversations" in record:
        return _share_gpt(record)
    is_alpaca = "instruction" in record and not OWN_FIELDS & record.keys()
    return _alpaca(record) if is_alpaca else record


def _share_gpt(record: Record) -> Record:
    turns = record["conversations"]
    if not isinstance(turns, list) or not turns:
        raise InvalidArgument('"conversations" is not a list of turns')
    messages = [_message(turn, f"conversations[{i}]") for i, turn in enumerate(turns)]
    system = record.get("system")
    if system:
        messages.insert(0, {"role": "system", "content": system})
    kept = {k: v for k, v in record.items() if k not in ("conversations", "system")}
    return {**kept, "messages": messages}


def _message(turn: object, where: str) -> dict[str, object]:
    if not isinstance(turn, dict):
        raise InvalidArgument(f"{where} is not an object")
    if "role" in turn:  # Some files have OpenAI's messages under ShareGPT's name.
        return turn
    role = ROLES.get(str(turn.get("from")))
    if role is None:
        raise InvalidArgument(
            f'{where}: "from" is {turn.get("from")!r}; must be one of '
            f'{", ".join(ROLES)}. Write turns of tools as "messages"'
        )
    if turn.get("value") is None:
        raise InvalidArgument(f'{where}: no "value"')
    rest = {k: v for k, v in turn.items() if k not in ("from", "value")}
    return {**rest, "role": role, "content": turn.get("value")}


def _alpaca(record: Record) -> Record:
    if record.get("history"):
        raise InvalidArgument(
            'a record with "instruction" has "history"; write its turns as "messages"'
        )
    question = [text_field(record, "instruction")]
    if record.get("input"):
        question.append(text_field(record, "input"))
    messages = [{"role": "user", "content": "\n".join(question)}]
    if record.get("system"):
        messages.insert(0, {"role": "system", "content": text_field(record, "system")})
    if "output" in record:
        messages.append({"role": "assistant", "content": text_field(record, "output")})
    return {"messages": messages}


def text_field(record: Record, name: str) -> str:
    """Returns the field's text. Raises InvalidArgument for anything else."""
    value = record.get(name)
    if not isinstance(value, str):
        raise InvalidArgument(f'"{name}" is not a text')
    return value


def with_parsed_calls(
    messages: Sequence[Mapping[str, object]],
) -> list[Mapping[str, object]]:
    """Returns the messages with the arguments of tool calls as objects. In OpenAI's
    form they are JSON in a text, which templates would write as JSON of a text. Raises
    InvalidArgument for a text that is no JSON object."""
    result: list[Mapping[str, object]] = []
    for place, message in enumerate(messages):
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            where = f"messages[{place}].tool_calls"
            parsed = [_parsed(call, f"{where}[{c}]") for c, call in enumerate(calls)]
            message = {**message, "tool_calls": parsed}
        result.append(message)
    return result


def _parsed(call: object, where: str) -> object:
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _parsed(function, f"{where}.function")}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise InvalidArgument(f"{where}.arguments is a text, but no JSON object")
    return {**call, "arguments": parsed}
