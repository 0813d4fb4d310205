"""Encode conversations: the tokens of the rendered text, and which of them the assistant wrote."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.data.preprocessing.documents import DocumentRecord, RecordError, encode_utf8, parse_object
from megalite.data.tokenizers import IdArray
from megalite.data.tokenizers.chat_template import ChatTemplate, Message, chat_template_of, describe_message
from megalite.data.tokenizers.tokenizer import Tokenizer

ASSISTANT = "assistant"
"""The role whose messages are learned."""


class Conversation(NamedTuple):
    """Messages to learn from.

    Attributes:
        tools: descriptions of tools, as the template takes them; None without tools.
        first_answer: answers before this message belong to a prompt, and are not learned.
    """

    messages: Sequence[Message]
    tools: object = None
    first_answer: int = 0


class EncodedConversation(NamedTuple):
    """Encoded conversation.

    Attributes:
        is_answer: uint8, 1 for each token that the assistant wrote, including the end of its turn.
        num_text_bytes: size of the rendered text in UTF-8.
    """

    ids: IdArray
    is_answer: npt.NDArray[np.uint8]
    num_text_bytes: int


class _Answer(NamedTuple):
    """Part of a rendered text that an answer takes, in characters."""

    message: str
    begin: int
    end: int


def read_conversation(row: dict[str, Any], key: str) -> Conversation:
    """Return the conversation of a JSON object: a list of messages, or a prompt and its completion.

    Args:
        key: key of the list of messages; an object without it has the keys "prompt" and "completion", which
            are texts or lists of messages.

    Raises:
        RecordError: there are no messages, one is malformed, or none of them is an answer.
    """
    if key in row:
        conversation = Conversation(row[key], row.get("tools"))
    elif "prompt" in row and "completion" in row:
        prompt, completion = _messages(row, "prompt", "user"), _messages(row, "completion", ASSISTANT)
        conversation = Conversation([*prompt, *completion], row.get("tools"), len(prompt))
    else:
        has = ", ".join(map(repr, list(row)[:8])) or "no keys"
        raise RecordError(f"no key {key!r}, and not both 'prompt' and 'completion' (it has {has})")
    _check(conversation, key)
    return conversation


def _messages(row: dict[str, Any], key: str, role: str) -> list[Message]:
    """Return the messages under a key; a text is one message of this role."""
    value = row[key]
    if not isinstance(value, (str, list)):
        raise RecordError(f"the value of {key!r} is {type(value).__name__}, not a text or a list of messages")
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _check(conversation: Conversation, key: str) -> None:
    messages = conversation.messages
    if not isinstance(messages, list):
        raise RecordError(f"the value of {key!r} is {type(messages).__name__}, not a list of messages")
    if not messages:
        raise RecordError("the conversation has no messages")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RecordError(f"message {number} has no role: a message is an object with role and content")
        content = message.get("content")
        if message["role"] == ASSISTANT and not message.get("tool_calls") and _is_empty(content):
            raise RecordError(f"{describe_message(number, message)} is empty: there is no answer to learn")
        if content is None and not message.get("tool_calls"):
            raise RecordError(f"{describe_message(number, message)} has no content")
    if not any(each["role"] == ASSISTANT for each in messages[conversation.first_answer :]):
        raise RecordError(f"no message has the role {ASSISTANT}: there is no answer to learn")


def _is_empty(content: object) -> bool:
    return not (content.strip() if isinstance(content, str) else content)


class ConversationEncoder:
    """Renderer and tokenizer of conversations.

    Args:
        tokenizer: a tokenizer with a chat template.
        key: key of the list of messages in a JSON object.
        now: the time that the template reads.

    Raises:
        UserError: the tokenizer has no chat template, or it is not valid.
    """

    def __init__(self, tokenizer: Tokenizer, key: str, now: datetime.datetime) -> None:
        self._tokenizer = tokenizer
        self._template = chat_template_of(tokenizer, now)
        self._key = key

    def encode(self, records: Sequence[DocumentRecord]) -> list[EncodedConversation | RecordError]:
        """Encode the conversations of records, or return why a record has none."""
        rendered = [self._rendered(record) for record in records]
        texts = [self._parts(*each) for each in rendered if not isinstance(each, RecordError)]
        arrays = iter(self._tokenizer.encode_arrays(list(itertools.chain.from_iterable(texts))))
        sizes = iter([len(parts) for parts in texts])
        return [
            each
            if isinstance(each, RecordError)
            else self._encoded(each, list(itertools.islice(arrays, next(sizes))))
            for each in rendered
        ]

    def _rendered(self, record: DocumentRecord) -> tuple[str, list[_Answer]] | RecordError:
        try:
            conversation = read_conversation(parse_object(record), self._key)
            text, answers = _render(self._template, conversation)
        except RecordError as error:
            return error
        except ValueError as error:  # of the template
            return RecordError(str(error))
        if not answers:
            return RecordError("the chat template marks no answer of it, so there is nothing to learn")
        return text, answers

    @staticmethod
    def _parts(text: str, answers: list[_Answer]) -> list[bytes]:
        """Return the whole text and its beginnings up to each begin and end of an answer, in UTF-8."""
        ends = [end for answer in answers for end in (answer.begin, answer.end)]
        return [encode_utf8(part) for part in (text, *(text[:end] for end in ends))]

    @staticmethod
    def _encoded(
        rendered: tuple[str, list[_Answer]], arrays: list[IdArray]
    ) -> EncodedConversation | RecordError:
        """Find the tokens of each answer: the tokens of a beginning of the text must begin its tokens."""
        text, answers = rendered
        ids, *beginnings = arrays
        is_answer = np.zeros(len(ids), np.uint8)
        for answer, before, through in zip(answers, beginnings[::2], beginnings[1::2], strict=True):
            for part, where in ((before, "start"), (through, "end")):
                if not np.array_equal(ids[: len(part)], part):
                    return RecordError(
                        f"{answer.message}: a token spans the {where} of the answer, so its tokens differ "
                        "from those that generation continues: let the chat template put a special token "
                        "there"
                    )
            is_answer[len(before) : len(through)] = 1
        if not is_answer.any():
            return RecordError("no token of it belongs to an answer, so there is nothing to learn")
        return EncodedConversation(ids, is_answer, len(encode_utf8(text)))


def _render(template: ChatTemplate, conversation: Conversation) -> tuple[str, list[_Answer]]:
    rendered = template.render(conversation.messages, conversation.tools)
    if not template.marks_answers:
        return rendered.text, _answers_between_prefixes(template, conversation, rendered.text)
    num_of_prompt = 0
    if conversation.first_answer:
        prompt = conversation.messages[: conversation.first_answer]
        num_of_prompt = len(template.render(prompt, conversation.tools).answers)
    answers = rendered.answers[num_of_prompt:]
    return rendered.text, [_Answer(f"answer {i}", *each) for i, each in enumerate(answers, 1)]


def _answers_between_prefixes(template: ChatTemplate, conversation: Conversation, text: str) -> list[_Answer]:
    """Find each answer as the text that the conversation has after it, and not yet before it."""
    messages, tools = conversation.messages, conversation.tools
    answers = []
    for i in range(conversation.first_answer, len(messages)):
        if messages[i]["role"] != ASSISTANT:
            continue
        name = describe_message(i + 1, messages[i])
        before = template.render(messages[:i], tools, add_generation_prompt=True).text
        through = text if i + 1 == len(messages) else template.render(messages[: i + 1], tools).text
        if not through.startswith(before):
            raise ValueError(
                f"{name}: the chat template renders the messages before it differently once it is there, so "
                "the answer cannot be found: put {% generation %} and {% endgeneration %} around answers in "
                f"{template.source}"
            )
        if not text.startswith(through):
            raise ValueError(
                f"{name}: the chat template renders it differently once more messages follow, so the answer "
                "cannot be found: put {% generation %} and {% endgeneration %} around answers in "
                f"{template.source}"
            )
        answers.append(_Answer(name, len(before), _end_of_turn(through, messages[i])))
    return answers


def _end_of_turn(through: str, message: Message) -> int:
    """Return where an answer ends that ends a text: without the white space after the end-of-turn token.

    White space directly after the message's own text is kept: it is what ends the turn.
    """
    stripped, content = through.rstrip(), message.get("content")
    ends_with_content = isinstance(content, str) and stripped.endswith(content.rstrip())
    return len(through) if ends_with_content else len(stripped)
