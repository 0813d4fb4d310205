"""Command lines of the tools: their own flags, together with those of training."""

from __future__ import annotations

import pytest

from megalite.frontends.tool_parser import ToolParser, duration
from megalite.utils.errors import UserError


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
            ["--iteration", "9" * 400],
            f"argument --iteration: '{'9' * 40}... (400 characters)' is above 2**63 - 1 (see --help)",
        ),
        (
            ["--helpp", "--char", "5"],
            "unknown flag --helpp; nearest is --help (see --help)\n"
            "unknown flag --char; nearest is --chars (see --help)",
        ),
    ],
)
def test_a_wrong_flag_is_named_rather_than_one_that_is_missing(
    parser: ToolParser, words: list[str], said: str
) -> None:
    for parse in (parser.parse_args, parser.parse_known_args):
        with pytest.raises(UserError) as error:
            parse(words)
        assert str(error.value) == said


def test_all_errors_are_reported_at_once(parser: ToolParser) -> None:
    parser.add_argument("--order", choices=("up",), default="up")
    parser.add_argument("--names", nargs="+")
    parser.add_argument("--all", action="store_true")
    words = ["--chars", "many", "--order", "sideways", "--names", "--all=yes", "--chat", "3", "--neither"]
    expected = [
        "--all takes no value, but got 'yes' (see --help)",
        "unknown flag --chat; nearest is --chars (see --help)",
        "unknown flag --neither (see --help)",
        "argument --chars: invalid int value: 'many' (see --help)",
        "argument --order: invalid choice: 'sideways' (choose from up) (see --help)",
        "argument --names: expected at least one argument (see --help)",
        "the following arguments are required: --iteration (see --help)",
    ]
    with pytest.raises(UserError) as error:
        parser.parse_args(words)
    said = str(error.value).replace("from 'up'", "from up")  # without quotes from Python 3.12.8 on
    assert said.splitlines() == expected
    found, problems = parser.find_problems([*words, "--iteration", "7"])
    assert len(problems) == len(expected) - 1
    assert (found.iteration, found.chars, found.order, found.all) == (7, 3, "up", True)


def test_a_flag_that_is_misspelt_is_not_missing_too(parser: ToolParser) -> None:
    with pytest.raises(UserError) as error:
        parser.parse_args(["--iteratoin", "x"])
    assert str(error.value).splitlines() == [
        "unknown flag --iteratoin; nearest is --iteration (see --help)",
        "argument --iteration: invalid int value: 'x' (see --help)",
    ]


def test_flags_of_training_are_left_to_training(parser: ToolParser) -> None:
    words = ["--tp", "2", "--tensor_model_parallel_size", "2", "--deepspeed", "--num-layer", "3"]
    assert parser.parse_known_args(["--iteration", "3", *words])[1] == words
    with pytest.raises(UserError, match=r"unknown flag --tp \(see --help\)"):
        parser.parse_args(["--iteration", "3", *words])


def test_tokens_that_only_look_like_flags_are_values(parser: ToolParser) -> None:
    parser.add_argument("text", nargs="*")
    assert parser.parse_args(["--iteration=3", "--x y", "--", "--z"]).text == ["--x y", "--z"]


@pytest.mark.parametrize(
    ("text", "hours"), [("26000h", 26000), ("1000d", 24000), ("3y", 26280), ("0.5d", 12)]
)
def test_lengths_of_time_have_units(text: str, hours: float) -> None:
    assert duration(text) == 3600 * hours


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3", "'3' does not end in a unit: pass hours, days or years, such as 26000h, 1000d or 3y"),
        ("3w", "'3w' does not end in a unit"),
        ("", "'' does not end in a unit"),
        ("d", "'' is not a number above 0"),
        ("0d", "'0' is not a number above 0"),
        ("nand", "'nan' is not a number above 0"),
        ("1e305y", "'inf' is not a number above 0"),
    ],
)
def test_a_length_of_time_that_is_none_is_one_error(text: str, message: str) -> None:
    parser = ToolParser()
    parser.add_argument("--time", type=duration)
    with pytest.raises(UserError) as error:
        parser.parse_args(["--time", text])
    assert str(error.value).startswith(f"argument --time: {message}")
