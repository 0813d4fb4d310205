"""Render conversations with a tokenizer's own chat template, as transformers does.

The engine is Jinja in a sandbox. torch depends on Jinja, so this needs no further package.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from megalite.data.tokenizers.hf_tokenizer import HuggingFaceTokenizer, json_object
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.utils.errors import UserError, first_line, shortened

Message = Mapping[str, Any]

_FILE, _SETTINGS, _SPECIAL = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_CLOCK = "strftime_now"
_MARKS = tuple(f"\x02{secrets.token_hex(8)}{end}\x03" for end in "<>")
"""Texts around an answer in a rendered conversation. They are random, so that no message contains them."""


class Rendered(NamedTuple):
    """Rendered conversation.

    Attributes:
        answers: begin and end in characters of each part that the template marks as generated.
    """

    text: str
    answers: tuple[tuple[int, int], ...]


class ChatTemplate:
    """Template that renders the messages of a conversation to text.

    Attributes:
        source: file of the template, for messages.
        marks_answers: whether the template has ``{% generation %}`` around what the assistant writes.
        uses_clock: whether the text depends on the date.
    """

    def __init__(
        self, text: str, source: str, special_tokens: Mapping[str, str], now: datetime.datetime
    ) -> None:
        """Compile a template.

        Args:
            special_tokens: variables of the template, such as ``eos_token``.
            now: the time that the template reads.

        Raises:
            UserError: the template is not valid.
        """
        self.source = source
        self.marks_answers = _GENERATION_TAG.search(text) is not None
        self.uses_clock = _CLOCK in text
        self._text = text
        self._special_tokens = dict(special_tokens)
        self._now = now
        _ = self._compiled

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return _environment(self._now).from_string(self._text)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"the chat template {self.source} is not valid, line {error.lineno}: {first_line(error)}; "
                "correct it"
            ) from None

    @property
    def digest(self) -> str:
        """Return a digest of everything that the text of a conversation depends on besides its messages."""
        values = [self._text, sorted(self._special_tokens.items()), str(self._now.date())]
        return hashlib.sha256(json.dumps(values if self.uses_clock else values[:2]).encode()).hexdigest()

    def render(
        self, messages: Sequence[Message], tools: object = None, *, add_generation_prompt: bool = False
    ) -> Rendered:
        """Render messages.

        Args:
            tools: descriptions of the tools that the assistant may call, or None.
            add_generation_prompt: end with the text after which the assistant writes its answer.

        Raises:
            ValueError: the template refuses the messages, or fails on them; the message says why.
        """
        variables = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._special_tokens,
        }
        try:
            return _without_marks(self._compiled.render(variables))
        except _Refused as error:
            raise ValueError(f"the chat template refuses the messages: {first_line(error)}") from None
        except Exception as error:  # a template can fail in any way
            kind = type(error).__name__
            raise ValueError(f"the chat template {self.source} fails ({kind}: {first_line(error)})") from None


def chat_template_of(tokenizer: Tokenizer, now: datetime.datetime) -> ChatTemplate:
    """Return a tokenizer's chat template.

    Raises:
        UserError: the tokenizer has none, or cannot have one.
    """
    path = tokenizer.path if isinstance(tokenizer, HuggingFaceTokenizer) else None
    if path is None:
        raise UserError(
            "--chat needs a tokenizer.json, beside which the chat template is: pass --tokenizer-type "
            "HuggingFaceTokenizer and --tokenizer-model"
        )
    return load_chat_template(path, now)


def load_chat_template(tokenizer_json: Path, now: datetime.datetime) -> ChatTemplate:
    """Load the chat template beside a tokenizer.json.

    chat_template.jinja is read before the chat_template of tokenizer_config.json. Of several named templates
    the one named "default" is taken.

    Raises:
        UserError: there is no template, a file cannot be read, or the template is not valid.
    """
    settings = json_object(tokenizer_json.with_name(_SETTINGS))
    special = _special_tokens(json_object(tokenizer_json.with_name(_SPECIAL))) | _special_tokens(settings)
    path = tokenizer_json.with_name(_FILE)
    if path.is_file():
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), str(path), special, now)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {path}: {first_line(error)}") from None
    text = settings.get("chat_template")
    if isinstance(text, list):
        named = {each.get("name"): each.get("template") for each in text if isinstance(each, dict)}
        text = named.get("default")
        if text is None:
            raise UserError(
                f"{tokenizer_json.with_name(_SETTINGS)} has the chat templates {', '.join(map(str, named))} "
                f"and none named default: copy one of them to {path}"
            )
    if not isinstance(text, str):
        raise UserError(
            f"the tokenizer {tokenizer_json} has no chat template: neither {_FILE} nor a chat_template in "
            f"{_SETTINGS} is beside it; pass a chat model's tokenizer, or write {path}"
        )
    return ChatTemplate(text, str(tokenizer_json.with_name(_SETTINGS)), special, now)


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the tokens that settings name; a token may be an object with a content."""
    tokens = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token")
    }
    return {name: value for name, value in tokens.items() if isinstance(value, str)}


class _Refused(Exception):
    """Raised by a template that calls ``raise_exception``."""


class _Generation(jinja2.ext.Extension):
    """Tag ``{% generation %}``, which marks the text that the assistant writes."""

    tags = {"generation"}  # noqa: RUF012  # Jinja reads it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        begin, end = _MARKS
        return f"{begin}{caller()}{end}"


def _environment(now: datetime.datetime) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return the environment in which chat templates are written to run."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    # Jinja's own filter would escape HTML.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    environment.globals[_CLOCK] = now.strftime
    return environment


def _refuse(message: str) -> None:
    raise _Refused(message)


def _without_marks(text: str) -> Rendered:
    parts = re.split("|".join(map(re.escape, _MARKS)), text)
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + len(part))
    answers = tuple((ends[i], ends[i + 1]) for i in range(1, len(parts), 2))
    return Rendered("".join(parts), tuple((begin, end) for begin, end in answers if begin < end))


def describe_message(number: int, message: Message) -> str:
    """Return a message's number from 1 and its role, for errors."""
    return f"message {number} ({shortened(str(message.get('role')), 20)})"
