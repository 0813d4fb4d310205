"""Which tokens of a conversation are learned, and which conversations are refused."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from megalite.data.preprocessing.conversations import ConversationEncoder, EncodedConversation
from megalite.data.preprocessing.documents import DocumentRecord, RecordError
from megalite.data.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from megalite.data.tokenizers.tokenizer import ByteTokenizer
from megalite.utils.errors import UserError
from tests.chat import CHATML, MARKED, assistant, user, write_tokenizer

NOW = datetime.datetime(2026, 3, 4)
PLAIN = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
"""A template without special tokens: a line ends each turn."""
LAST_DIFFERS = """{% for m in messages %}[{{ m.role }}]
{%- if loop.last and m.role == "assistant" %}<think>{% endif %}
{{- m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
"""Like templates of reasoning models, which drop the thoughts of earlier answers."""
THINKS = CHATML.replace('assistant\n" -}}', 'assistant\n<think>" -}}')
"""The prompt to answer begins a thought that the conversation does not have."""


def _encode(template: str, *rows: Any, folder: Path) -> list[EncodedConversation | RecordError]:
    tokenizer = HuggingFaceTokenizer.load(write_tokenizer(folder, template))
    records = [
        DocumentRecord("chat.jsonl", i, "json", json.dumps(row).encode()) for i, row in enumerate(rows)
    ]
    return ConversationEncoder(tokenizer, "messages", NOW).encode(records)


def _learned(template: str, row: Any, folder: Path) -> list[str]:
    """The texts of the consecutive tokens that are learned."""
    (encoded,) = _encode(template, row, folder=folder)
    assert isinstance(encoded, EncodedConversation), encoded
    tokenizer = HuggingFaceTokenizer.load(str(folder))
    runs: list[list[int]] = [[]]
    for token, is_answer in zip(encoded.ids.tolist(), encoded.is_answer.tolist(), strict=True):
        if is_answer:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


TALK = {"messages": [user("Why?"), assistant("Because."), user("Oh."), assistant("Yes \n")]}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["Because.<|im_end|>", "Yes \n<|im_end|>"]),
        (MARKED, ["Because.<|im_end|>", "Yes \n<|im_end|>"]),
    ],
)
def test_answers_are_learned_with_the_end_of_turn(template: str, expected: list[str], tmp_path: Path) -> None:
    assert _learned(template, TALK, tmp_path) == expected


def test_a_line_that_ends_a_turn_is_learned(tmp_path: Path) -> None:
    row = {"messages": [user("Why?"), assistant("Because.")]}
    assert _learned(PLAIN, row, tmp_path) == [" Because.\n"]


def test_a_prompt_is_not_learned(tmp_path: Path) -> None:
    texts = {"prompt": "Why?", "completion": "Because."}
    assert _learned(CHATML, texts, tmp_path) == ["Because.<|im_end|>"]
    messages = {"prompt": TALK["messages"][:3], "completion": TALK["messages"][3:]}
    for template in (CHATML, MARKED):
        assert _learned(template, messages, tmp_path) == ["Yes \n<|im_end|>"]


def test_tokens_are_those_of_the_whole_text(tmp_path: Path) -> None:
    (encoded,) = _encode(CHATML, TALK, folder=tmp_path)
    assert isinstance(encoded, EncodedConversation)
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TALK["messages"])
    tokenizer = HuggingFaceTokenizer.load(str(tmp_path))
    assert encoded.ids.tolist() == tokenizer.encode(text)
    assert encoded.num_text_bytes == len(text)


def test_a_bad_conversation_does_not_hinder_others(tmp_path: Path) -> None:
    bad = {"messages": []}
    first, refused, last = _encode(CHATML, TALK, bad, {"prompt": "a", "completion": "b"}, folder=tmp_path)
    assert isinstance(refused, RecordError)
    assert isinstance(first, EncodedConversation)
    assert isinstance(last, EncodedConversation)
    assert len(first.ids) > len(last.ids)


BAD = [
    ([], "not a JSON object"),
    ({"text": "a"}, "no key 'messages', and not both 'prompt' and 'completion' (it has 'text')"),
    ({"prompt": "a"}, "not both 'prompt' and 'completion'"),
    ({"prompt": "a", "completion": 3}, "the value of 'completion' is int, not a text or a list of messages"),
    ({"messages": "a"}, "the value of 'messages' is str, not a list of messages"),
    ({"messages": []}, "the conversation has no messages"),
    ({"messages": ["a"]}, "message 1 has no role"),
    ({"messages": [{"content": "a"}]}, "message 1 has no role"),
    ({"messages": [user("a"), {"role": "assistant"}]}, "message 2 (assistant) is empty"),
    (
        {"messages": [user("a"), assistant(" \n")]},
        "message 2 (assistant) is empty: there is no answer to learn",
    ),
    ({"messages": [{"role": "user"}, assistant("a")]}, "message 1 (user) has no content"),
    ({"messages": [user("a")]}, "no message has the role assistant: there is no answer to learn"),
    ({"prompt": [assistant("a")], "completion": [user("b")]}, "no message has the role assistant"),
    (
        {"messages": [{"role": "tool", "content": "a"}, assistant("b")]},
        "the chat template refuses the messages: the role tool is unknown",
    ),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_bad_conversations(row: Any, message: str, tmp_path: Path) -> None:
    (error,) = _encode(CHATML, row, folder=tmp_path)
    assert isinstance(error, RecordError)
    assert message in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (LAST_DIFFERS, "message 2 (assistant): the chat template renders it differently once more messages"),
        (THINKS, "message 2 (assistant): the chat template renders the messages before it differently"),
        ("{{ messages[0].content }}{% generation %}{% endgeneration %}", "marks no answer of it"),
        ("{{ messages[9].content }}", "fails (UndefinedError"),
    ],
)
def test_templates_whose_answers_cannot_be_found(template: str, message: str, tmp_path: Path) -> None:
    (error,) = _encode(template, TALK, folder=tmp_path)
    assert isinstance(error, RecordError)
    assert message in str(error)


def test_a_token_may_not_span_the_start_of_an_answer(tmp_path: Path) -> None:
    """In "assistant: because", the space belongs to the token of the answer's first word."""
    spaced = PLAIN.replace("assistant:{% endif %}", "assistant: {% endif %}")
    (error,) = _encode(spaced, {"messages": [user("Why"), assistant("the end")]}, folder=tmp_path)
    assert isinstance(error, RecordError)
    assert "message 2 (assistant): a token spans the start of the answer" in str(error)


def test_marks_allow_what_prefixes_do_not(tmp_path: Path) -> None:
    marked = LAST_DIFFERS.replace(
        "{{- m.content }}<|im_end|>",
        """{%- if m.role == "assistant" %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
        {%- else %}{{ m.content }}<|im_end|>{% endif %}""",
    )
    assert _learned(marked, TALK, tmp_path) == ["Because.<|im_end|>", "Yes \n<|im_end|>"]


def test_a_tokenizer_without_a_file_has_no_template() -> None:
    with pytest.raises(UserError, match=r"--chat needs a tokenizer\.json"):
        ConversationEncoder(ByteTokenizer(), "messages", NOW)
