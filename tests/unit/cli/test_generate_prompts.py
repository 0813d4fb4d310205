"""Prompts from the command line and from files, and their maximum of new tokens."""

import dataclasses

import pytest

from megalite.cli.generate import DEFAULT_NEW_TOKENS, as_questions, prompts_of, read_prompts
from megalite.config.presets import PRESETS
from megalite.data.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from megalite.data.tokenizers.tokenizer import ByteTokenizer
from megalite.utils.errors import UserError
from tests.chat import write_tokenizer

GPT = dataclasses.replace(PRESETS["gpt-tiny"], seq_length=10)
BLOOM = dataclasses.replace(PRESETS["bloom-tiny"], seq_length=10)


def test_files_of_prompts(tmp_path):
    lines, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("one\n\n  two \r\nthree")
    objects.write_text('{"prompt": "a\\nb"}\n{"prompt": "c", "more": 1}\n')
    assert read_prompts(None, str(lines)) == ["one", "  two ", "three"]
    assert read_prompts(None, str(objects)) == ["a\nb", "c"]
    assert read_prompts("as it is\n", None) == ["as it is\n"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"\n \n", "has no prompt"),
        ("binary.txt", b"\xff\xfe", "is not UTF-8"),
        ("bad.jsonl", b'{"prompt": "a"}\nno json\n', "line 2 is not an object"),
        ("twice.jsonl", b'{"prompt": "a", "prompt": "b"}\n', 'line 1 cannot be read: it has "prompt" twice'),
        ("other.jsonl", b'{"text": "a"}\n', "line 1 is not an object"),
        ("half.jsonl", b'{"prompt": "a\\udcff"}\n', "line 1 is not UTF-8 at character 2"),
        ("gone.txt", None, "cannot be read: No such file"),
    ],
)
def test_bad_files(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_prompts(None, str(tmp_path / name))


def test_bytes_of_a_command_line_that_are_not_utf_8():
    """Python represents them as lone surrogates."""
    with pytest.raises(UserError, match="--prompt is not UTF-8 at character 3"):
        read_prompts("ab\udcff", None)


def new_tokens(model, length, requested):
    (prompt,) = prompts_of(["x" * length], ByteTokenizer(), model, requested)
    return prompt.max_new_tokens


def test_positions_of_a_learned_table():
    """The last new token is never an input: ten positions suffice for eleven tokens."""
    assert new_tokens(GPT, 4, None) == 7
    assert new_tokens(GPT, 4, 7) == 7
    assert new_tokens(GPT, 10, None) == 1
    with pytest.raises(UserError, match=r"4 tokens and --max-new-tokens 8 need 11 positions.* 10"):
        new_tokens(GPT, 4, 8)
    with pytest.raises(UserError, match="prompt 0 has 11 tokens, but the model has 10 positions"):
        new_tokens(GPT, 11, None)


def test_other_positions_have_no_end():
    assert new_tokens(BLOOM, 40, None) == DEFAULT_NEW_TOKENS
    assert new_tokens(BLOOM, 40, 1000) == 1000


def test_an_empty_prompt_begins_a_document():
    (prompt,) = prompts_of([""], ByteTokenizer(), BLOOM, None)
    assert prompt.ids == [ByteTokenizer.eod]


def test_questions_are_rendered_up_to_the_answer(tmp_path):
    tokenizer = HuggingFaceTokenizer.load(write_tokenizer(tmp_path))
    expected = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert as_questions(["Why?"], tokenizer) == [expected]
    write_tokenizer(tmp_path, "{{ raise_exception('never') }}")
    with pytest.raises(UserError, match="the chat template refuses the messages: never"):
        as_questions(["Why?"], tokenizer)
    with pytest.raises(UserError, match=r"--chat needs a tokenizer\.json"):
        as_questions(["Why?"], ByteTokenizer())
