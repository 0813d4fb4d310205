"""Prompts: where they come from, their tokens, and how much can follow them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megalite.config import ModelConfig
from megalite.data.tokenizer import Tokenizer
from megalite.errors import UserError
from megalite.generation.generator import Prompt
from megalite.log import log
from megalite.parsing import parse_json

STANDARD_INPUT = "-"
DEFAULT_NEW_TOKENS = 128


def read_prompts(prompt: str | None, prompt_file: str | None) -> list[str]:
    """The texts that are to be continued.

    Args:
        prompt: the only text; "-" for all of standard input.
        prompt_file: a text a line, empty lines aside, or in a .jsonl file an object with "prompt" a line; "-"
            for standard input.

    Raises:
        UserError: the file cannot be read, or holds no prompt.
    """
    if prompt is not None:
        text = _standard_input().removesuffix("\n") if prompt == STANDARD_INPUT else prompt
        return [_encodable(text, "--prompt")]
    assert prompt_file is not None
    text = _standard_input() if prompt_file == STANDARD_INPUT else _read(prompt_file)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"--prompt-file {prompt_file} holds no prompt: write one a line")
    if prompt_file.endswith(".jsonl"):
        return [_from_json(line, f"{prompt_file} line {number}") for number, line in lines]
    return [line.removesuffix("\r") for _, line in lines]


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise UserError("standard input is not UTF-8") from None


def _read(path: str) -> str:
    try:
        return Path(path).read_bytes().decode()
    except OSError as error:
        raise UserError(f"--prompt-file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--prompt-file {path} is not UTF-8") from None


def _from_json(line: str, where: str) -> str:
    try:
        record = parse_json(line)
    except ValueError:
        record = None
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str):
        raise UserError(f'{where} is no object with a text as its "prompt"')
    return _encodable(prompt, where)


def _encodable(text: str, where: str) -> str:
    """Return the text; refuse one with lone surrogates, which stand for bytes that are not UTF-8.

    Raises:
        UserError: it has some.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where} is not UTF-8 at character {error.start + 1}: give UTF-8 text") from None
    return text


def prompts_of(
    texts: Sequence[str], tokenizer: Tokenizer, model: ModelConfig, max_new_tokens: int | None
) -> list[Prompt]:
    """The prompts with their tokens; an empty one begins after the end of a document.

    Args:
        max_new_tokens: as the user gives it; None for `DEFAULT_NEW_TOKENS`, or for as many as the model has
            positions for.

    Raises:
        UserError: a prompt has too many tokens for the model's positions.
    """
    has_table = model.position_embedding_type == "learned_absolute"
    prompts = []
    for number, text in enumerate(texts):
        ids = tokenizer.encode(text) or [tokenizer.eod]
        # The last new token is never read, so it needs no position.
        room = model.num_positions - len(ids) + 1 if has_table else None
        prompts.append(Prompt(number, ids, _num_new(number, len(ids), max_new_tokens, room)))
    longest = max(len(prompt.ids) + prompt.max_new_tokens for prompt in prompts)
    if not has_table and longest > model.seq_length + 1:
        log.warning(
            "texts of up to %d tokens go beyond the %d that the model was trained on",
            longest,
            model.seq_length,
        )
    return prompts


def _num_new(number: int, length: int, asked: int | None, room: int | None) -> int:
    if room is None:
        return asked or DEFAULT_NEW_TOKENS
    if room < 1:
        raise UserError(
            f"prompt {number} has {length} tokens, and the model {length + room - 1} positions: shorten it"
        )
    if asked is not None and asked > room:
        raise UserError(
            f"prompt {number} of {length} tokens and --max-new-tokens {asked} need {length + asked - 1} "
            f"positions, and the model has {length + room - 1}: give at most {room}"
        )
    return asked or min(DEFAULT_NEW_TOKENS, room)
