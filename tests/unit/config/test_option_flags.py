"""A config field and its value as they are written on a command line."""

from __future__ import annotations

import pytest

from megalite.config.option import flag_tokens, flag_with_value


@pytest.mark.parametrize(
    ("name", "value", "tokens"),
    [
        ("train_iters", 9, ["--train-iters", "9"]),
        ("pipeline_layers", (3, 5), ["--pipeline-layers", "3", "5"]),
        ("data_path", ("a b", "c"), ["--data-path", "a b", "c"]),
        ("recompute_modules", (), ["--recompute-modules"]),
        ("finetune", True, ["--finetune"]),
        ("load_optim", False, ["--no-load-optim"]),
    ],
)
def test_a_field_and_its_value(name: str, value: object, tokens: list[str]) -> None:
    assert flag_tokens(name, value) == tokens
    assert flag_with_value(name, value) == " ".join(tokens)
