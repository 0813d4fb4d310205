"""A chat model's tokenizer and conversations, for the tests of fine-tuning."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from megalite.data.indexed_dataset import IndexedWriter
from megalite.data.preprocessing.input_plan import PreprocessJob
from megalite.data.preprocessing.preprocess import preprocess
from megalite.data.tokenizers.tokenizer import TokenizerFiles

ROOT = Path(__file__).parents[1]
VOCABULARY = 2050
"""The corpus's 2,048 tokens, and the two of ChatML."""
CHATML = """\
{%- for message in messages -%}
    {%- if message.role not in ("system", "user", "assistant") -%}
        {{- raise_exception("the role " + message.role + " is unknown") -}}
    {%- endif -%}
    {{- "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\n" -}}
{%- endif -%}
"""
MARKED = """\
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\n" }}
    {%- if message.role == "assistant" %}
        {%- generation %}{{ message.content + "<|im_end|>" }}{% endgeneration %}
        {{- "\n" }}
    {%- else %}
        {{- message.content + "<|im_end|>\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" }}
{%- endif %}
"""
"""The same text, with the answers marked"""


def write_tokenizer(folder: Path, template: str | None = CHATML) -> str:
    """Write the corpus's tokenizer with ChatML's tokens and a template; return the tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(ROOT / "scripts" / "corpus" / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return str(path)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def conversations(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations of one to three turns of different lengths."""
    generator = random.Random(seed)
    rows = []
    for i in range(number):
        messages = []
        for turn in range(generator.randint(1, 3)):
            polite = " Please." * generator.randint(0, 5)
            messages.append(user(f"What is {i} plus {turn}?{polite}"))
            messages.append(assistant(f"{i} plus {turn} is {i + turn}."))
        rows.append({"messages": messages})
    return rows


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def preprocess_chat(folder: Path, rows: list[Any], template: str | None = CHATML, **options: Any) -> str:
    """Preprocess conversations with a tokenizer in the same folder; return the prefix."""
    files = TokenizerFiles(tokenizer_model=write_tokenizer(folder / "tokenizer", template))
    job = PreprocessJob(
        (write_jsonl(folder / "chat.jsonl", rows),),
        str(folder / "chat"),
        None,
        files,
        json_keys=("messages",),
        chat=True,
        **options,
    )
    preprocess(job)
    return job.prefix("messages")


def write_masked(prefix: str, lengths: list[int], first_answer: int = 1) -> str:
    """Write conversations of these lengths and tokens counted up from 0; return the prefix.

    Tokens from `first_answer` on are answers.
    """
    with IndexedWriter(prefix, "uint16", overwrite=True) as writer:
        writer.add_documents(np.arange(sum(lengths)), np.array(lengths, np.int32))
    mask = np.concatenate([np.arange(length) >= first_answer for length in lengths])
    Path(f"{prefix}.loss_mask").write_bytes(mask.astype(np.uint8).tobytes())
    return prefix
