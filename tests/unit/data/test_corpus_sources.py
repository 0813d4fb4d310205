"""The ways of saying what each split reads, and what is refused of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.config import DataConfig
from megalite.data.corpus_sources import Blend, CorpusSource, find_sources, parse_weighted_groups
from megalite.utils.errors import UserError

FLAG = "--valid-weighted-split-paths"


def test_split_of_one_blend() -> None:
    sources = find_sources(DataConfig(data_path=("0.3", "a", "0.7", "b"), split="80,15,5"))
    parts = {
        split: [source.sequences(1000) for source in blends[0].sources] for split, blends in sources.items()
    }
    assert parts == {
        "train": [range(0, 800)] * 2,
        "valid": [range(800, 950)] * 2,
        "test": [range(950, 1000)] * 2,
    }
    assert all(blends[0].weights == (0.3, 0.7) for blends in sources.values())


def test_the_words_of_data_path_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("0.3 a\n0.7   b\n")
    by_file = find_sources(DataConfig(data_args_path=str(tmp_path / "words")))
    assert by_file == find_sources(DataConfig(data_path=("0.3", "a", "0.7", "b")))


def test_each_split_by_itself(tmp_path: Path) -> None:
    sources = find_sources(DataConfig(train_data_path=("a", "b", "c"), valid_data_path=("2", "d", "1", "e")))
    (train,), (valid,), test = sources["train"], sources["valid"], sources["test"]
    assert [source.prefix for source in train.sources] == ["a", "b", "c"] and train.weights is None
    assert [source.prefix for source in valid.sources] == ["d", "e"] and valid.weights == (2, 1)
    assert all(source.sequences(7) == range(7) for source in (*train.sources, *valid.sources))
    assert test == ()
    (tmp_path / "f.json").write_text(json.dumps({"train": ["a", "b", "c"], "valid": [2, "d", "1", "e"]}))
    assert find_sources(DataConfig(per_split_data_args_path=str(tmp_path / "f.json"))) == sources


def test_each_corpus_is_a_validation_set_of_its_own() -> None:
    """The blend is for training: evaluation reads the validation part of each corpus."""
    data = DataConfig(
        data_path=("0.3", "en/text", "0.7", "code"), split="8,1,1", multiple_validation_sets=True
    )
    sources = find_sources(data)
    assert [blend.weights for blend in sources["train"]] == [(0.3, 0.7)] == [sources["test"][0].weights]
    assert [(each.name, each.sources[0].prefix) for each in sources["valid"]] == [
        ("text", "en/text"),
        ("code", "code"),
    ]
    assert [source.sequences(10) for each in sources["valid"] for source in each.sources] == [range(8, 9)] * 2
    own = replace(data, data_path=(), train_data_path=("a",), valid_data_path=("x/c", "y/c"))
    names = [blend.name for blend in find_sources(replace(own, validation_set_names=("X", "Y")))["valid"]]
    assert names == ["X", "Y"]
    for wrong, message in (
        (own, "and their names are c c: pass --validation-set-names with 2 different names"),
        (replace(own, validation_set_names=("X",)), "evaluates on 2 corpora, and their names are X"),
        (replace(own, validation_set_names=("X", "y/c")), "names are X y/c: pass .* without a slash"),
        (replace(own, valid_data_path=("1", "a", "2", "b")), "--valid-data-path has weights, which"),
    ):
        with pytest.raises(UserError, match=message):
            find_sources(wrong)


def test_relative_prefixes_begin_in_the_folder_of_an_azure_job() -> None:
    corpora = ("0.3", "ar/text", "0.6", "/other/text", "0.1", "s3://bucket/text")
    (blend,) = find_sources(DataConfig(data_path=corpora, aml_data_download_path="/mnt/data"))["train"]
    assert [source.prefix for source in blend.sources] == ["/mnt/data/ar/text", *corpora[3::2]]
    assert blend.weights == (0.3, 0.6, 0.1)
    weighted = DataConfig(
        train_weighted_split_paths=("all: 1 0:0.9 en/text",),
        valid_weighted_split_paths=("all: 1 0.9:1 en/text",),
        aml_data_download_path="/mnt/data/",
    )
    sources = find_sources(weighted)
    assert [sources[split][0].sources[0].prefix for split in ("train", "valid")] == ["/mnt/data/en/text"] * 2


@pytest.mark.parametrize("in_file", [False, True])
def test_weighted_groups(tmp_path: Path, in_file: bool) -> None:
    groups = ("ENGLISH: 0.6 0.95:1 /d/en:1, 0.4 0:1 /d/fr", "ARABIC: 1 0.9:0.95 /d/ar")
    fields: dict[str, Any] = {"train_weighted_split_paths": ("T: 1 0:0.9 /d/ar",)}
    if in_file:
        (tmp_path / "valid").write_text("  ".join(f'"{group}"' for group in groups) + "\n")
        fields["valid_weighted_split_paths_path"] = str(tmp_path / "valid")
    else:
        fields["valid_weighted_split_paths"] = groups
    sources = find_sources(DataConfig(**fields))
    assert sources["valid"] == (
        Blend((CorpusSource("/d/en:1", 0.95, 1), CorpusSource("/d/fr", 0, 1)), (0.6, 0.4), "ENGLISH", FLAG),
        Blend((CorpusSource("/d/ar", 0.9, 0.95),), None, "ARABIC", FLAG),
    )
    assert [blend.name for blend in sources["train"]] == ["T"] and sources["test"] == ()


@pytest.mark.parametrize(
    ("size", "expected"), [(10, range(2, 6)), (5, range(1, 3)), (1, range(0, 1)), (2, range(0, 1))]
)
def test_a_part_is_rounded_as_bloom_rounds_it(size: int, expected: range) -> None:
    assert CorpusSource("p", 0.25, 0.6).sequences(size) == expected


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (["1 0:1 p"], "'1 p' in 1 0"),
        (["no name"], "without a name"),
        ([": 1 0:1 p"], "without a name"),
        (["a/b: 1 0:1 p"], "called a/b: give it a name without a slash"),
        (["A:"], "'' in A: write WEIGHT BEGIN:END PREFIX"),
        (["A: 1 0:1 p,"], "'' in A"),
        (["A: 1 0:1"], "'1 0:1' in A"),
        (["A: x 0:1 p"], "'x 0:1 p' in A"),
        (["A: 1 0:1:1 p"], "'1 0:1:1 p' in A"),
        (["A: 0 0:1 p"], "weight 0 for p in A"),
        (["A: nan 0:1 p"], "weight nan for p in A"),
        (["A: 1 0.5:0.5 p"], "0.5:0.5 for p in A"),
        (["A: 1 -0.5:0.5 p"], "-0.5:0.5 for p in A"),
        (["A: 1 0:1.5 p"], "0:1.5 for p in A"),
        (["A: 1 0:nan p"], "0:nan for p in A"),
        (["A: 1 0:1 p", "A: 1 0:1 q"], "two groups called A"),
    ],
)
def test_malformed_groups_are_named(groups: list[str], message: str) -> None:
    with pytest.raises(UserError, match=FLAG) as caught:
        parse_weighted_groups(FLAG, groups)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("field", "content", "message"),
    [
        ("train_weighted_split_paths_path", "A: 1 0:1 p", "in double quotes"),
        ("train_weighted_split_paths_path", '"A: 1 0:1 p"\n"B: 1 0:1 q"', "one line"),
        ("train_weighted_split_paths_path", '"A: 1 0:1 p" "B: 1 0:1 q', "No closing quotation"),
        ("train_weighted_split_paths_path", '"A: 1 0:1 p" "B: 1 0:1 q"', "has 2 groups, A, B"),
        ("train_weighted_split_paths_path", "", "in double quotes"),
        ("train_weighted_split_paths_path", None, "cannot be read: No such file"),
        ("data_args_path", None, "cannot be read: No such file"),
        ("data_args_path", b"\xff", "not UTF-8 text"),
        ("data_args_path", "", "there is no dataset"),
        ("per_split_data_args_path", "{", "must be a JSON object"),
        ("per_split_data_args_path", "[]", "must be a JSON object"),
        ("per_split_data_args_path", '{"train": ["a"], "train": ["b"]}', 'it has "train" twice in an object'),
        ("per_split_data_args_path", '{"train": "a"}', "must be a JSON object"),
        ("per_split_data_args_path", '{"train": [["a"]]}', "must be a JSON object"),
        ("per_split_data_args_path", '{"train": ["a"], "vaild": ["b"]}', "but has 'vaild'"),
        ("per_split_data_args_path", '{"valid": ["b"]}', "nothing to train on"),
        ("per_split_data_args_path", '{"train": [1, "a", "x", "b"]}', "--train-data-path has x"),
    ],
)
def test_malformed_files_are_named(
    tmp_path: Path, field: str, content: str | bytes | None, message: str
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        find_sources(DataConfig(**{field: str(path)}))  # type: ignore[arg-type]
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1
