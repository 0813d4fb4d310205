"""Chat templates, against transformers, which renders the same files."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from megalite.data.tokenizers.chat_template import ChatTemplate, load_chat_template
from megalite.utils.errors import UserError
from tests.chat import CHATML, MARKED, assistant, user, write_tokenizer

NOW = datetime.datetime(2026, 3, 4)
TALK = [user("How many <b>sheep</b>? é"), assistant("A hundred.\n"), user("And goats?"), assistant(" None. ")]
TOOLS = [{"type": "function", "function": {"name": "count", "description": "it's <b> é"}}]
TEMPLATES = {
    "ChatML": CHATML,
    "marked answers": MARKED,
    "special tokens": """
        {{ bos_token }}{% for m in messages %}[{{ m['role'] }}]
        {{ m['content'] | trim }}{{ eos_token }}{% endfor %}
        """,
    "tools as JSON": """{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}
        {{ tools | tojson }}
        {% for m in messages %}
        {{ m.content }}
        {% endfor %}
        """,
    "loop controls and namespaces": """
        {%- set state = namespace(last='') %}
        {%- for m in messages %}
            {%- if m.role == 'user' %}{% set state.last = m.content %}{% continue %}{% endif %}
            {{- state.last ~ ' -> ' ~ m.content }}
        {%- endfor %}""",
}


def _template(text: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate(text, "chat_template.jinja", special_tokens, NOW)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompts", [False, True])
def test_text_is_that_of_transformers(name: str, prompts: bool, tmp_path: Path) -> None:
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    theirs = PreTrainedTokenizerFast(tokenizer_file=write_tokenizer(tmp_path), **tokens)
    expected = theirs.apply_chat_template(
        TALK,
        tools=TOOLS,
        tokenize=False,
        chat_template=TEMPLATES[name],
        add_generation_prompt=prompts,
    )
    ours = _template(TEMPLATES[name], **tokens).render(TALK, TOOLS, add_generation_prompt=prompts)
    assert ours.text == expected


def test_marked_answers_are_those_of_transformers(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=write_tokenizer(tmp_path))
    theirs: Any = tokenizer.apply_chat_template(
        TALK, chat_template=MARKED, return_assistant_tokens_mask=True, return_dict=True
    )
    ids = [
        i for i, is_answer in zip(theirs["input_ids"], theirs["assistant_masks"], strict=True) if is_answer
    ]
    rendered = _template(MARKED).render(TALK)
    assert tokenizer.decode(ids) == "".join(rendered.text[begin:end] for begin, end in rendered.answers)
    assert [rendered.text[begin:end] for begin, end in rendered.answers] == [
        "A hundred.\n<|im_end|>",
        " None. <|im_end|>",
    ]
    assert _template(MARKED).marks_answers
    assert not _template(CHATML).marks_answers


def test_the_date_is_part_of_the_digest_if_the_template_reads_it() -> None:
    clock = "{{ strftime_now('%d %B %Y') }}"
    assert _template(clock).render([]).text == "04 March 2026"
    later = datetime.datetime(2026, 3, 5)
    assert ChatTemplate(clock, "", {}, later).digest != ChatTemplate(clock, "", {}, NOW).digest
    assert ChatTemplate(CHATML, "", {}, later).digest == ChatTemplate(CHATML, "", {}, NOW).digest
    assert _template(CHATML).digest != _template(MARKED).digest
    assert _template(CHATML, eos_token="a").digest != _template(CHATML, eos_token="b").digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{{ raise_exception('no system role\\nhere') }}",
            "the chat template refuses the messages: no system",
        ),
        ("{{ messages[7].content }}", "the chat template chat_template.jinja fails (UndefinedError: "),
        ("{{ ''.__class__.__mro__ }}", "fails (SecurityError: "),
        ("{% set _ = messages.append(1) %}", "fails (SecurityError: "),
    ],
)
def test_a_template_that_fails_says_why_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        _template(text).render([user("a")])
    assert "\n" not in str(caught.value)


def test_a_template_that_is_not_valid() -> None:
    with pytest.raises(UserError, match=r"chat_template.jinja is not valid, line 2: .*endfor"):
        _template("{% for m in messages %}\n{% endif %}")


def test_the_template_file_is_read_before_the_settings(tmp_path: Path) -> None:
    path = Path(write_tokenizer(tmp_path, template=None))
    settings = tmp_path / "tokenizer_config.json"

    def rendered() -> str:
        return load_chat_template(path, NOW).render([user("a")]).text

    special = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    settings.write_text(json.dumps({"chat_template": "{{ bos_token }}one{{ eos_token }}", **special}))
    assert rendered() == "<s>one</s>"
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    settings.write_text(json.dumps({"chat_template": named}))
    assert rendered() == "three"
    (tmp_path / "chat_template.jinja").write_text("four")
    assert rendered() == "four"
    (tmp_path / "chat_template.jinja").unlink()
    settings.write_text(json.dumps({"chat_template": named[:1]}))
    with pytest.raises(UserError, match="has the chat templates tool_use and none named default"):
        rendered()
    settings.write_text("{}")
    with pytest.raises(UserError, match=r"has no chat template: .*; pass a chat model's tokenizer, or write"):
        rendered()
    settings.write_text("[")
    with pytest.raises(UserError, match=r"cannot read .*tokenizer_config.json"):
        rendered()
