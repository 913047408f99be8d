"""A model folder's tokenizer, with its end-of-sequence ids and chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from weft.data.chat import ChatTemplate, Message
from weft.data.contents import Contents, Tokens, encode_text
from weft.data.forms import with_parsed_calls
from weft.errors import InvalidArgument
from weft.types import StrPath

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

HALF = "\ufffd"  # The decoded text of a character that lacks some bytes.


def _byte_alphabet() -> dict[str, int]:
    """Maps each character of a byte-level vocabulary to the byte that it stands for.

    A byte that is printable in Latin-1 is its own character. The other bytes, in order,
    have the characters from U+0100 on. Source: the byte encoder of GPT-2.
    """
    alphabet: dict[str, int] = {}
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or (byte >= 0xA1 and byte != 0xAD):
            alphabet[chr(byte)] = byte
    others = sorted(set(range(256)) - set(alphabet.values()))
    alphabet |= {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return alphabet


_BYTE_OF = _byte_alphabet()


class ModelTokenizer:
    """Turns texts and chats into the token ids that the model was trained on.

    tokenizer: a Tokenizer of the package `tokenizers`. eos_ids: the tokens that end
    the model's output; training data ends with the first. template: the chat
    template; None for a model without chats. tool_template: that of chats with tools;
    None: the same.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int] = (),
        template: ChatTemplate | None = None,
        tool_template: ChatTemplate | None = None,
    ) -> None:
        # tokenizer.json may ask for padding and truncation to a fixed length.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._template = template
        self._tool_template = tool_template or template
        self.eos_ids = tuple(eos_ids)
        # Ids lie below it: those of a server's model, once the server has named it.
        self.vocab_size = 1 << 32
        # The number of special tokens before a text. An end of sequence may be the
        # first token, too.
        mask: list[int] = tokenizer.encode("a").special_tokens_mask
        self._num_first = mask.index(0) if 0 in mask else len(mask)

    @classmethod
    def from_folder(
        cls,
        folder: StrPath,
        *,
        chat_template: StrPath | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> ModelTokenizer:
        """Reads tokenizer.json and, if they exist, tokenizer_config.json,
        special_tokens_map.json, added_tokens.json, generation_config.json, config.json,
        chat_template.jinja and additional_chat_templates/tool_use.jinja.

        chat_template: a file with a Jinja template that replaces the folder's.
        chat_template_kwargs: the template's own switches, such as
        {"enable_thinking": False}. Raises InvalidArgument if tokenizer.json or the
        template is missing, if the template has no such switch, if a file cannot be
        parsed, if the other files name a token that the tokenizer cannot have, or if
        the package tokenizers is missing.
        """
        path = Path(folder, "tokenizer.json")
        if not path.is_file():
            raise InvalidArgument(f"no tokenizer.json in {folder}{_remedy(folder)}")
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise InvalidArgument(
                "text needs the package tokenizers: pip install tokenizers"
            ) from None
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers has no exception class of its own.
            raise InvalidArgument(f"{path} cannot be read: {error}") from None
        config = _json(Path(folder, "tokenizer_config.json"))
        named = {**_json(Path(folder, "special_tokens_map.json")), **config}
        special = {
            name: text
            for name in named
            if name.endswith("_token") and (text := _token_text(named[name]))
        }
        _add_tokens(tokenizer, Path(folder), config, set(special.values()))
        _check_special(tokenizer, special)
        if chat_template is None:
            sources = _template_sources(Path(folder), config)
        else:
            sources = {"default": template_text(Path(chat_template))}
        source = sources.get("default")
        if source is None and chat_template_kwargs:
            raise InvalidArgument(
                f"chat_template_kwargs: {folder} has no chat template that reads them"
            )
        template, tool_template = (
            None if one is None else ChatTemplate(one, special, chat_template_kwargs)
            for one in (source, sources.get("tool_use"))
        )
        eos_ids: list[int] = []
        own = tokenizer.token_to_id(special.get("eos_token", ""))
        for entry in (own, *_eos_entries(Path(folder))):
            if isinstance(entry, int) and entry not in eos_ids:
                eos_ids.append(entry)
        return cls(tokenizer, eos_ids, template, tool_template)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Returns the token ids of a text, [N].

        special: adds the special tokens that the tokenizer puts around a text, such
        as a first token, unless the text begins with it, as one that a chat template
        has written does. An end of sequence that the tokenizer would add is left out,
        because the model goes on with the text, and an Encoder ends it. Raises
        InvalidArgument for a string that is no valid text, such as half a surrogate
        pair.
        """
        encoding = encode_text(self._tokenizer, text, special)
        ids: list[int] = encoding.ids
        added: list[int] = encoding.special_tokens_mask  # 1: not from the text.
        end = len(ids)
        while end > self._num_first and added[end - 1] and ids[end - 1] in self.eos_ids:
            end -= 1
        first = self._num_first
        is_double = special and 0 < first < end and ids[first] == ids[first - 1]
        return ids[: first - 1] + ids[first:end] if is_double else ids[:end]

    def vocabulary(self) -> dict[str, int]:
        """Returns the id of each token."""
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return ids

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Returns the text of token ids. special: shows special tokens, too."""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=not special
        )
        return text

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes that a token adds to an answer. The bytes may be only part
        of a character, so a str could not hold them."""
        text = self.decode([token], special=True)
        if HALF not in text:
            return text.encode()
        name = self._tokenizer.id_to_token(token) or text
        if fallback := re.fullmatch("<0x([0-9A-F]{2})>", name):
            return bytes.fromhex(fallback[1])
        if all(character in _BYTE_OF for character in name):
            return bytes(_BYTE_OF[character] for character in name)
        return text.encode()

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        last: bool = False,
    ) -> tuple[list[int], list[bool]]:
        """Returns a chat's token ids [N], and which of them the assistant wrote [N].

        The result equals that of transformers' `apply_chat_template` with
        `return_assistant_tokens_mask`, with two exceptions: texts of special tokens in
        messages do not become these tokens, and if a turn's last character has several
        tokens, they all belong to the turn. If the template marks no turns,
        a turn is the text that it adds to the prompt before it, up to the turn's last
        end of sequence.

        last: marks only the last message. Raises InvalidArgument if no message is the
        assistant's, if the template refuses the chat, or if there is no template.
        """
        text, spans, marked = self._chat_template(tools).spans(
            self._contents.mark(with_parsed_calls(messages)),
            self._contents.mark(tools),
            last,
            self._common,
        )
        encoding = self._encode_chat(text)
        tokens: list[int] = encoding.ids
        written = [False] * len(tokens)
        for begin, end in spans:
            # Finds the first character that has a token. Some spaces have none.
            places = map(encoding.char_to_token, range(begin, end))
            first = next((at for at in places if at is not None), None)
            if first is None:
                continue
            if not marked:  # Spaces after the turn may have no token.
                end = begin + len(text[begin:end].rstrip())
            final = encoding.char_to_token(end - 1)
            stop = len(tokens) if final is None else final + 1
            # A character may have several tokens. They all belong to the turn.
            while stop < len(tokens) and encoding.offsets[stop][0] < end:
                stop += 1
            if not marked:
                stop = self._after_last_eos(tokens, first, stop)
            written[first:stop] = [True] * (stop - first)
        return tokens, written

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        switches: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Returns the token ids of a chat whose next turn is the assistant's, [P].

        switches: the template's own, for this chat. Raises InvalidArgument if the
        template refuses the chat or reads no such switch, or there is no template.
        """
        template = self._chat_template(tools)
        text = template.render(
            self._contents.mark(with_parsed_calls(messages)),
            tools=self._contents.mark(tools),
            add_generation_prompt=True,
            switches=self._contents.mark(switches or {}),
        )
        return list(self._encode_chat(text).ids)

    def _encode_chat(self, text: str) -> Encoding | Tokens:
        return self._contents.encode(text) or encode_text(self._tokenizer, text)

    def _common(self, one: str, other: str) -> int:
        """Returns how many characters of `other` come from the tokens with which both
        texts begin."""
        encoding = self._encode_chat(other)
        first: list[int] = self._encode_chat(one).ids
        tokens: list[int] = encoding.ids
        pairs = enumerate(zip(first, tokens, strict=False))
        shorter = min(len(first), len(tokens))
        same = next((at for at, (a, b) in pairs if a != b), shorter)
        return len(other) if same == len(tokens) else int(encoding.offsets[same][0])

    def _after_last_eos(self, tokens: Sequence[int], first: int, stop: int) -> int:
        """Returns the end of a turn: the position after its last end of sequence, or
        `stop` if it has none. The model does not write the line break that follows the
        end of sequence."""
        ends = [i for i in range(first, stop) if tokens[i] in self.eos_ids]
        return ends[-1] + 1 if ends else stop

    @cached_property
    def _contents(self) -> Contents:
        return Contents(self._tokenizer)

    def _chat_template(self, tools: Sequence[Message] | None) -> ChatTemplate:
        template = self._template if tools is None else self._tool_template
        if template is None:
            raise InvalidArgument("the model folder has no chat template")
        return template


def _added_tokens(folder: Path, config: Mapping[str, object]) -> dict[int, object]:
    """Returns the tokens, by id, that the folder adds to those of tokenizer.json."""
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        return {int(number): entry for number, entry in decoder.items()}
    names = _json(folder / "added_tokens.json")
    return {number: name for name, number in names.items() if isinstance(number, int)}


def _remedy(folder: StrPath) -> str:
    """Returns how to get a tokenizer.json from the folder's older file; empty if there
    is none."""
    if not Path(folder, "tokenizer.model").is_file():
        return ""
    return (
        ", only tokenizer.model; transformers makes one:"
        f" AutoTokenizer.from_pretrained({str(folder)!r})"
        f".save_pretrained({str(folder)!r})"
    )


def _add_tokens(
    tokenizer: Tokenizer,
    folder: Path,
    config: Mapping[str, object],
    special: Collection[str],
) -> None:
    """Adds the folder's tokens that tokenizer.json lacks, as transformers does. Raises
    InvalidArgument if one would not get its id."""
    from tokenizers import AddedToken

    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for number, entry in sorted(_added_tokens(folder, config).items()):
        text = _token_text(entry)
        if text is None or tokenizer.token_to_id(text) is not None:
            continue
        options = {"special": text in special, "normalized": False}
        if isinstance(entry, dict):
            options = {name: bool(entry[name]) for name in flags if name in entry}
        tokenizer.add_tokens([AddedToken(text, **options)])
        if tokenizer.token_to_id(text) != number:
            raise InvalidArgument(
                f"{folder}: token {text!r} ({number}) is not in tokenizer.json, and "
                f"added to it would be {tokenizer.token_to_id(text)}; save the "
                "tokenizer again with transformers"
            )


def _check_special(tokenizer: Tokenizer, special: Mapping[str, str]) -> None:
    """Raises InvalidArgument for a first or last token that the tokenizer lacks: it
    would be spelled out in letters."""
    for name in ("bos_token", "eos_token"):
        text = special.get(name)
        if text and tokenizer.token_to_id(text) is None:
            raise InvalidArgument(
                f"{name} {text!r} is not in tokenizer.json, nor among the added "
                "tokens; save the tokenizer again with transformers"
            )


def _json(path: Path) -> Mapping[str, object]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise InvalidArgument(f"{path}: {error}") from None
    return value if isinstance(value, dict) else {}


def _token_text(entry: object) -> str | None:
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _eos_entries(folder: Path) -> list[object]:
    entries: list[object] = []
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        entries += value if isinstance(value, list) else [value]
    return entries


def template_text(path: StrPath) -> str:
    """Returns a chat template. Raises InvalidArgument if the file cannot be read."""
    try:
        return Path(path).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"chat template {path}: {error}") from None


def _template_sources(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Returns the folder's chat templates by name. A chat with tools has "tool_use", if
    there is one, and all others "default"."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        more = folder / "additional_chat_templates" / "tool_use.jinja"
        found = {"default": path, "tool_use": more}
        return {n: template_text(p) for n, p in found.items() if p.is_file()}
    source = config.get("chat_template")
    if isinstance(source, str):
        return {"default": source}
    entries = (
        [e for e in source if isinstance(e, dict)] if isinstance(source, list) else []
    )
    named = {str(e.get("name")): e.get("template") for e in entries}
    return {n: text for n, text in named.items() if isinstance(text, str)}
