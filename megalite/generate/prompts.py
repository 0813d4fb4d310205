"""Read texts and prompts, render questions, tokenize them, and limit new tokens to the model's positions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from json import JSONDecodeError
from pathlib import Path
from typing import TypeVar, cast

from megalite.config import ModelConfig
from megalite.data.tokenizers.chat_template import chat_template_of
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.distributed.topology import Topology
from megalite.generate.generator import Prompt
from megalite.utils.errors import UserError
from megalite.utils.files import parse_json
from megalite.utils.log import log

STANDARD_INPUT = "-"
DEFAULT_NEW_TOKENS = 128
Texts = TypeVar("Texts")


def from_first_rank(read: Callable[[], Texts], topology: Topology) -> Texts:
    """Return what the first rank reads, on all ranks.

    Raises:
        UserError: `read` has raised it. Every rank raises it.
    """
    with topology.agreed():
        found = read() if topology.rank == 0 else None
    return cast(Texts, topology.world.object_of_first(found, "texts"))


def read_text(path: str, flag: str) -> str:
    """Read a file of UTF-8 text, or standard input if the path is "-".

    Raises:
        UserError: it cannot be read; the message names the flag of the path.
    """
    try:
        return (sys.stdin.buffer.read() if path == STANDARD_INPUT else Path(path).read_bytes()).decode()
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        name = "standard input" if path == STANDARD_INPUT else f"{flag} {path}"
        raise UserError(f"{name} is not UTF-8") from None


def read_prompts(prompt: str | None, prompt_file: str | None) -> list[str]:
    """Read the texts to continue.

    Args:
        prompt: the only text; "-" reads it from standard input.
        prompt_file: a file with one text per line (empty lines are skipped), or a .jsonl file with one
            {"prompt": ...} per line; "-" for standard input.

    Raises:
        UserError: the file cannot be read, or has no prompt.
    """
    if prompt is not None:
        text = read_text(prompt, "--prompt").removesuffix("\n") if prompt == STANDARD_INPUT else prompt
        return [_encodable(text, "--prompt")]
    assert prompt_file is not None
    text = read_text(prompt_file, "--prompt-file")
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"--prompt-file {prompt_file} has no prompt: write one per line")
    if prompt_file.endswith(".jsonl"):
        return [_from_json(line, f"{prompt_file} line {number}") for number, line in lines]
    return [line.removesuffix("\r") for _, line in lines]


def _from_json(line: str, where: str) -> str:
    try:
        record = parse_json(line, unique_keys=True)
    except JSONDecodeError:
        record = None
    except ValueError as error:
        raise UserError(f"{where} cannot be read: {error}") from None
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str):
        raise UserError(f'{where} is not an object with a string "prompt"')
    return _encodable(prompt, where)


def _encodable(text: str, where: str) -> str:
    """Return the text if it is UTF-8.

    Raises:
        UserError: it has lone surrogates, with which Python represents bytes that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where} is not UTF-8 at character {error.start + 1}: pass UTF-8 text") from None
    return text


def as_questions(texts: Sequence[str], tokenizer: Tokenizer) -> list[str]:
    """Return each text as a user's message, rendered up to where the assistant answers.

    Raises:
        UserError: the tokenizer has no chat template, or it refuses the message.
    """
    template = chat_template_of(tokenizer, datetime.now())
    try:
        return [
            template.render([{"role": "user", "content": text}], add_generation_prompt=True).text
            for text in texts
        ]
    except ValueError as error:
        raise UserError(str(error)) from None


def prompts_of(
    texts: Sequence[str], tokenizer: Tokenizer, model: ModelConfig, max_new_tokens: int | None
) -> list[Prompt]:
    """Tokenize prompts; an empty prompt becomes an end-of-document token.

    Args:
        max_new_tokens: the user's limit; None for `DEFAULT_NEW_TOKENS`, or fewer if the model has fewer
            positions left.

    Raises:
        UserError: a prompt has too many tokens for the model's positions.
    """
    has_table = model.position_embedding_type == "learned_absolute"
    prompts = []
    for number, text in enumerate(texts):
        ids = tokenizer.encode(text) or [tokenizer.eod]
        # The last new token is never an input, so it needs no position.
        free = model.num_positions - len(ids) + 1 if has_table else None
        prompts.append(Prompt(number, ids, _num_new(number, len(ids), max_new_tokens, free)))
    longest = max(len(prompt.ids) + prompt.max_new_tokens for prompt in prompts)
    if not has_table and longest > model.seq_length + 1:
        log.warning(
            "texts can have up to %d tokens, but the model was trained with a sequence length of %d",
            longest,
            model.seq_length,
        )
    return prompts


def _num_new(number: int, length: int, requested: int | None, free: int | None) -> int:
    if free is None:
        return requested or DEFAULT_NEW_TOKENS
    if free < 1:
        raise UserError(
            f"prompt {number} has {length} tokens, but the model has {length + free - 1} positions: "
            "shorten it"
        )
    if requested is not None and requested > free:
        raise UserError(
            f"prompt {number} of {length} tokens and --max-new-tokens {requested} need "
            f"{length + requested - 1} positions, but the model has {length + free - 1}: pass at most {free}"
        )
    return requested or min(DEFAULT_NEW_TOKENS, free)
