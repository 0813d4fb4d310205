"""What a checkpoint says about itself is read back; what is not a checkpoint is reported in one line."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import megalite
from megalite.checkpoint.manifest import (
    CONFIG,
    INDEX,
    RUN,
    SUMS,
    TEXTS,
    DamagedCheckpoint,
    OtherFormat,
    damage_of,
    read_manifest,
)
from megalite.checkpoint.parameter_range import ParameterRange
from tests.checkpoint_folder import cut_pieces, edit, edit_piece, edit_run, reseal, write_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path)


def problem_of(folder: Path) -> str:
    with pytest.raises(DamagedCheckpoint) as caught:
        read_manifest(folder)
    assert "\n" not in str(caught.value)
    (problem,) = caught.value.problems
    return problem


def test_it_comes_back(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest.config_text == "model: {}\n"
    assert manifest.files == tuple(f"part_{number}.safetensors" for number in range(4))
    assert manifest.description["progress"]["iteration"] == 10
    assert manifest.description["megalite"] == megalite.__version__
    assert manifest.description["torch"] == torch.__version__
    assert manifest.tensors.keys() == {"cut", "padded", "steps"}
    assert [record.range for record in manifest.tensors["cut"]] == [
        pieces["cut"].range for pieces in cut_pieces()
    ]
    assert manifest.tensors["steps"][2].file == "part_2.safetensors"
    assert manifest.tensors["steps"][2].range is None
    assert {record.dtype for record in manifest.tensors["cut"]} == {"float64"}
    assert damage_of(manifest, manifest.files) == []


def test_the_version_that_wrote_it_does_not_matter(folder: Path) -> None:
    tensors = read_manifest(folder).tensors
    edit_run(folder, megalite="0.1.0")
    manifest = read_manifest(folder)
    assert (manifest.description["megalite"], manifest.tensors) == ("0.1.0", tensors)


def test_sha256sum_checks_it_by_hand(folder: Path) -> None:
    if not shutil.which("sha256sum"):
        pytest.skip("there is no sha256sum")
    found = subprocess.run(["sha256sum", "-c", SUMS], cwd=folder, capture_output=True, text=True, check=True)
    assert found.stdout.count(": OK\n") == 7


@pytest.mark.parametrize("name", [*TEXTS, SUMS])
def test_a_lost_text_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert problem_of(folder) == f"{name} is missing"


@pytest.mark.parametrize("name", TEXTS)
def test_another_text_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text((folder / name).read_text() + " ")
    assert problem_of(folder) == f"{name} has other contents than SHA256SUMS says"


def test_lost_and_altered_tensor_files_are_named(folder: Path) -> None:
    manifest = read_manifest(folder)
    (folder / "part_0.safetensors").unlink()
    os.truncate(folder / "part_2.safetensors", 60)
    (folder / "part_3.safetensors").rename(folder / "elsewhere")
    (folder / "part_3.safetensors").symlink_to("elsewhere")
    assert damage_of(manifest, manifest.files) == [
        "part_0.safetensors is missing",
        "part_2.safetensors has other contents than SHA256SUMS says",
        "part_3.safetensors cannot be read: it is a symbolic link",
    ]


def test_a_missing_folder_is_reported(folder: Path) -> None:
    assert problem_of(folder / "none") == "the folder is missing"


@pytest.mark.parametrize("name", [*TEXTS, SUMS])
@pytest.mark.parametrize("content", [b"", b"\x80\xff", b"[1, 2]", b"[" * 100000, b"null", b"3" * 5000])
def test_a_text_that_is_not_ours_is_reported(folder: Path, name: str, content: bytes) -> None:
    """Whoever wrote it made the digests fit."""
    (folder / name).write_bytes(content)
    if name == CONFIG:
        if content == b"\x80\xff":
            reseal(folder, name)
            assert problem_of(folder) == "config.yaml is damaged: it is not text"
        return
    if name != SUMS:
        reseal(folder, name)
    assert problem_of(folder).startswith(f"{name} is ")


@pytest.mark.parametrize("part", ["format", "progress", "model", "run"])
@pytest.mark.parametrize("value", [None, "x", [], 1.5, True])
def test_wrong_types_in_run_json_are_reported(folder: Path, part: str, value) -> None:
    edit_run(folder, **{part: value})
    assert problem_of(folder).startswith("run.json is ")


PLACE = ParameterRange((4, 6), (0, 0), (4, 4), 0, 7).record()


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.update(tensors=[]),
        lambda index: index.update(tensors={"cut": 3}),
        lambda index: index.update(tensors={"cut": None}),
        lambda index: index.update(tensors={"cut": ["file"]}),
        lambda index: index.update(tensors={"cut": []}),
        lambda index: index.update(tensors={"cut": [{"file": "part_0.safetensors"}]}),
        lambda index: index.pop("tensors"),
        lambda index: index.pop("files"),
        lambda index: index.update(files="part_0.safetensors"),
        lambda index: index.update(files=[1]),
        lambda index: index.update(files=[["part_0.safetensors"]]),
        lambda index: index.update(blocks=[]),
        lambda index: index.update(blocks={"part_9.safetensors": [64 * "0"]}),
        lambda index: index.update(blocks={"part_0.safetensors": []}),
        lambda index: index.update(block_bytes=0),
        lambda index: index.update(block_bytes=1 << 40),
    ],
)
def test_wrong_types_in_index_json_are_reported(folder: Path, change) -> None:
    edit(folder, INDEX, lambda index: change(index) and None)
    assert problem_of(folder).startswith("index.json is damaged: ")


@pytest.mark.parametrize(
    "fields",
    [
        *({"dtype": name} for name in (None, 3, "float31", "Tensor", "__name__", "load")),
        *({"file": name} for name in (None, 3, [], "none.safetensors")),
        *({"place": place} for place in ([], 3, "x", {})),
        *({"place": PLACE | {"offsets": offsets}} for offsets in ([7], [0, 1e99])),
        {"place": PLACE | {"full_shape": [True, 6]}},
    ],
    ids=str,
)
def test_a_wrong_piece_is_reported(folder: Path, fields) -> None:
    edit_piece(folder, "cut", **fields)
    assert problem_of(folder).startswith("index.json is damaged: cut")


@pytest.mark.parametrize(
    "name",
    [
        *("../part_0.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", ""),
        *(".metadata", "x.pt", "x.safetensors\n", "\u0000.safetensors", "x.safetensors/"),
    ],
)
def test_names_that_lead_out_of_the_folder_are_reported(folder: Path, name: str) -> None:
    def point_elsewhere(index) -> None:
        index["files"].append(name)
        index["tensors"]["cut"][0]["file"] = name

    edit(folder, INDEX, point_elsewhere)
    assert problem_of(folder) == "index.json is damaged: its files are not in this folder"


@pytest.mark.parametrize("name", [*TEXTS, SUMS])
def test_a_link_is_reported(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    assert problem_of(folder) == f"{name} cannot be read: it is a symbolic link"


@pytest.mark.parametrize("name", [*TEXTS, SUMS])
def test_a_text_without_end_is_not_read(folder: Path, name: str) -> None:
    with (folder / name).open("wb") as sparse:
        sparse.truncate(1 << 40)
    assert " has more than " in problem_of(folder) or " it has more than " in problem_of(folder)


@pytest.mark.parametrize("count", [-1, 1 << 63, 1 << 80, 10**400, True, 1.0, "3", None])
def test_a_malformed_count_is_reported(folder: Path, count: object) -> None:
    edit_run(folder, progress={"iteration": 10, "consumed_samples": count})
    assert problem_of(folder) == "run.json is damaged: its progress is malformed"


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    (folder / RUN).unlink()
    os.mkfifo(folder / RUN)
    assert problem_of(folder) == "run.json cannot be read: it is not a regular file"


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines[:-1],
        lambda lines: lines[1:],
        lambda lines: [*lines, "0" * 64 + "  more.safetensors"],
        lambda lines: [*lines, lines[0]],
        lambda lines: [lines[0].replace("  ", " "), *lines[1:]],
        lambda lines: [lines[0].upper(), *lines[1:]],
    ],
)
def test_other_sums_are_reported(folder: Path, change) -> None:
    lines = (folder / SUMS).read_text().splitlines()
    (folder / SUMS).write_text("\n".join(change(lines)) + "\n")
    assert problem_of(folder).startswith(SUMS)


def test_a_folder_under_another_name_is_reported(folder: Path) -> None:
    other = folder.rename(folder.with_name("iter_0000020"))
    assert problem_of(other) == "run.json belongs to iteration 10, not to iter_0000020"


def test_a_folder_with_a_free_name_is_read(folder: Path) -> None:
    assert read_manifest(folder.rename(folder.with_name("best"))).config_text


def test_a_later_format_says_to_upgrade(folder: Path) -> None:
    edit_run(folder, format=6)
    with pytest.raises(OtherFormat, match="it has format 6, this version reads 3 to 5: upgrade megalite"):
        read_manifest(folder)


def test_the_format_before_is_reported(tmp_path: Path) -> None:
    (tmp_path / RUN).write_text(json.dumps({"format": 2, "progress": {}, "files": []}))
    with pytest.raises(OtherFormat, match="it has format 2, this version reads 3 to 5: only the version of"):
        read_manifest(tmp_path)


def test_a_damaged_format_is_no_other_format(folder: Path) -> None:
    (folder / RUN).write_text((folder / RUN).read_text().replace('"format": 5', '"format": 7'))
    assert problem_of(folder) == "run.json has other contents than SHA256SUMS says"


@pytest.mark.parametrize("kind", [DamagedCheckpoint, OtherFormat])
def test_what_is_wrong_travels_between_ranks(kind: type[DamagedCheckpoint]) -> None:
    error = kind(Path("a"), ("b", "c"))
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.problems, str(again)) == (kind, ("b", "c"), str(error))
