"""Renders a model's own chat template as transformers does, without transformers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NoReturn

from weft.errors import InvalidArgument

if TYPE_CHECKING:
    import jinja2

# {"role": ..., "content": ...}, with all other fields that the template reads.
Message = Mapping[str, object]
Span = tuple[int, int]  # Characters [begin, end) of a rendered chat.
# Returns how many characters of the second text come from the tokens with which both
# texts begin.
Common = Callable[[str, str], int]
# The names that every template gets.
_OWN_NAMES = ("messages", "tools", "documents", "add_generation_prompt")


def _refuse(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter would escape characters for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment(pieces: list[str], spans: list[Span]) -> jinja2.Environment:
    """Returns the environment that templates of Hugging Face models expect.

    The environment appends the span of each {% generation %} block to `spans`. To
    find a span's place in the text, it needs the text before the span. So the caller
    appends each piece of text to `pieces` as soon as it is rendered.
    """
    try:
        from jinja2 import nodes
    except ImportError:
        raise InvalidArgument(
            "chats need the package jinja2: pip install jinja2"
        ) from None
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.runtime import Macro

    from weft.data.sandbox import Sandbox

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (jinja's own form)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_note")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _note(self, caller: Macro) -> str:
            text = str(caller())
            begin = sum(map(len, pieces))
            spans.append((begin, begin + len(text)))
            return text

    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
        optimized=False,  # Constants would be computed before the deadline begins.
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


class ChatTemplate:
    """Renders chats as `apply_chat_template` of transformers does.

    source: the Jinja template. special: the texts of the special tokens that the
    template may use, keyed by names such as bos_token. kwargs: the template's own
    switches, such as {"enable_thinking": False}. Raises InvalidArgument if the
    template is broken, if it does not read one of the switches, or if jinja2 is
    missing. Threads: any.
    """

    def __init__(
        self,
        source: str,
        special: Mapping[str, str],
        kwargs: Mapping[str, object] | None = None,
    ) -> None:
        self._lock = threading.Lock()  # Guards _pieces and _spans.
        self._pieces: list[str] = []
        self._spans: list[Span] = []
        environment = _environment(self._pieces, self._spans)
        import jinja2
        from jinja2 import meta

        try:
            self._template = environment.from_string(source)
            read = meta.find_undeclared_variables(environment.parse(source))
        # Python itself refuses what is nested too deeply.
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise InvalidArgument(f"chat template: {error}") from error
        self._read = read
        self._switches = read - {*special, *_OWN_NAMES, *environment.globals}
        self._check_switches(kwargs or {})
        self._names = {**special, **(kwargs or {})}
        self._shows_tools = "tools" in read
        self._shows_calls = "tool_calls" in source

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = False,
        switches: Mapping[str, object] | None = None,
    ) -> str:
        """Returns the chat as text. switches: those of this chat, which go before the
        template's `kwargs`. Raises InvalidArgument if the template refuses the chat, or
        reads no tools or calls of tools that it has, or not one of the switches."""
        self._check_shown(messages, tools)
        self._check_switches(switches or {})
        return self._render(messages, tools, add_generation_prompt, switches)[0]

    def spans(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        last: bool,
        common: Common,
    ) -> tuple[str, list[Span], bool]:
        """Returns the chat as text, the spans that the assistant wrote, and whether
        the template marks them by {% generation %}. If the template marks none, a span
        is the text that a turn of the assistant adds to the turn's prompt. If the turn
        lacks the prompt's end, such as an opened <think>, the span follows the tokens
        that both have in common. A message with "weight" 0 has no span.

        last: returns only the span of the last message. Raises InvalidArgument if no
        message is the assistant's or, with `last`, if the last one is not. Also raises
        InvalidArgument if the template marks nothing and renders a turn at the end of
        a chat differently from the same turn within a chat. For such a template, only
        the last turn can be found, so use `last`.
        """
        self._check_shown(messages, tools)
        text, marked = self._render(messages, tools, False)
        turns = [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
        if not turns or (last and turns[-1] != len(messages) - 1):
            raise InvalidArgument(
                "the last message is not the assistant's"
                if last and turns
                else "no message of the assistant"
            )
        learnt = [messages[turn].get("weight", 1) != 0 for turn in turns]
        if marked:
            if not all(learnt):
                if len(marked) != len(turns):
                    raise InvalidArgument(
                        f"a message has weight 0, but the chat template marks "
                        f"{len(marked)} stretches in {len(turns)} turns"
                    )
                marked = [m for m, one in zip(marked, learnt, strict=True) if one]
                if last and not learnt[-1]:
                    marked = []
            return text, marked[-1:] if last else marked, True
        used = [turn for turn, one in zip(turns, learnt, strict=True) if one]
        if last:
            used = [turn for turn in used if turn == turns[-1]]
        return text, list(self._added(text, messages, tools, used, common)), False

    def _check_switches(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._switches:
                known = ", ".join(sorted(self._switches)) or "none"
                why = f"it reads no switch {name[:60]!r}"
                if name in self._read:
                    why = f"{name!r} has its value from Weft"
                raise InvalidArgument(f"chat template: {why}; its switches: {known}")

    def _check_shown(
        self, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> None:
        """Raises InvalidArgument for tools that the template would leave out without a
        word."""
        if tools and not self._shows_tools:
            raise InvalidArgument("the chat template shows no tools")
        if self._shows_calls:
            return
        for index, message in enumerate(messages):
            if isinstance(message, Mapping) and message.get("tool_calls"):
                raise InvalidArgument(
                    f"messages[{index}] has tool_calls, which the chat template does "
                    "not show"
                )

    def _added(
        self,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        turns: Sequence[int],
        common: Common,
    ) -> Iterator[Span]:
        for turn in turns:
            before = self._render(messages[:turn], tools, True)[0]
            after = text
            if turn + 1 < len(messages):
                after = self._render(messages[: turn + 1], tools, False)[0]
            if not text.startswith(after):
                raise InvalidArgument(
                    f"messages[{turn}]: the chat template renders this turn in another "
                    "way within the chat than at its end, and marks no {% generation %}"
                    "; learn the last turn alone"
                )
            begin = len(before)
            if not after.startswith(before):
                known = self._render(messages[:turn], tools, False)[0]
                if not (before.startswith(known) and after.startswith(known)):
                    raise InvalidArgument(
                        f"messages[{turn}]: the chat template renders the messages "
                        "before this turn in another way than within the chat, and "
                        "marks no {% generation %}; use another template "
                        "(--chat-template), or write prompt and completion as texts"
                    )
                begin = max(common(before, after), len(known))
            yield begin, len(after)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        add_generation_prompt: bool,
        switches: Mapping[str, object] | None = None,
    ) -> tuple[str, list[Span]]:
        from weft.data.sandbox import Deadline

        with self._lock:
            self._pieces.clear()
            self._spans.clear()
            try:
                with Deadline():
                    for piece in self._template.generate(
                        messages=messages,
                        tools=tools,
                        documents=None,
                        add_generation_prompt=add_generation_prompt,
                        **{**self._names, **(switches or {})},
                    ):
                        self._pieces.append(piece)
            # A template is a program that can raise any exception. This treats every
            # exception as an error of the chat.
            except Exception as error:
                raise InvalidArgument(f"chat template: {error}") from error
            return "".join(self._pieces), list(self._spans)
