"""Command lines of the tools: their own flags, together with those of training."""

from __future__ import annotations

import pytest

from megalite.config.tool_parser import ToolParser
from megalite.errors import UserError


@pytest.fixture
def parser() -> ToolParser:
    parser = ToolParser()
    parser.add_argument("--iteration", type=int, required=True)
    parser.add_argument("--chars", type=int, default=72)
    return parser


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--helpp"], "unknown flag --helpp; nearest is --help (see --help)"),
        (["--iteratoin=3"], "unknown flag --iteratoin; nearest is --iteration (see --help)"),
        (["--iteration", "3", "--chats", "5"], "unknown flag --chats; nearest is --chars (see --help)"),
        (
            ["--helpp", "--char", "5"],
            "unknown flag --helpp; nearest is --help (see --help)\n"
            "unknown flag --char; nearest is --chars (see --help)",
        ),
    ],
)
def test_a_misspelt_flag_is_named_rather_than_one_that_is_missing(
    parser: ToolParser, words: list[str], said: str
) -> None:
    for parse in (parser.parse_args, parser.parse_known_args):
        with pytest.raises(UserError) as error:
            parse(words)
        assert str(error.value) == said


def test_flags_of_training_are_left_to_training(parser: ToolParser) -> None:
    words = ["--tp", "2", "--tensor_model_parallel_size", "2", "--deepspeed", "--num-layer", "3"]
    assert parser.parse_known_args(["--iteration", "3", *words])[1] == words
    with pytest.raises(UserError, match=r"unknown flag --tp \(see --help\)"):
        parser.parse_args(["--iteration", "3", *words])


def test_tokens_that_only_look_like_flags_are_values(parser: ToolParser) -> None:
    parser.add_argument("text", nargs="*")
    assert parser.parse_args(["--iteration=3", "--x y", "--", "--z"]).text == ["--x y", "--z"]
