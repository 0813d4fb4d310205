"""A corpus that another tokenizer made is refused before training."""

from __future__ import annotations

from pathlib import Path

from megalite.data.tokenizers.tokenizer import ByteTokenizer, NullTokenizer, write_tokenizer_digest
from tests.end_to_end.conftest import RunHere, write_corpus


def test_refused_by_name_or_trained_on(pretrain_here: RunHere, tmp_path: Path) -> None:
    prefix = str(tmp_path / "corpus")
    write_corpus(prefix, [b"some text " * 50] * 40)
    write_tokenizer_digest(prefix, NullTokenizer(256))  # of as many tokens
    status, lines = pretrain_here("--data-path", prefix)
    assert status == 1
    assert [line for line in lines if line.startswith("error: ")] == [
        f"error: {prefix}: made with another tokenizer than this run's, so its ids mean other text: "
        f"pass the same tokenizer, or delete {prefix}.tokenizer.json if you know that they are equal"
    ]
    write_tokenizer_digest(prefix, ByteTokenizer())
    assert pretrain_here("--data-path", prefix, "--train-iters", "1")[0] == 0
