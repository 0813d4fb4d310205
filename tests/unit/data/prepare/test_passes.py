"""What is removed, by a search through all pairs; and that order, cuts and kills change nothing."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.prepare import exchange, passes
from megalite.data.prepare.fingerprints import band_keys, exact_keys
from megalite.data.prepare.passes import PassWorker
from megalite.data.prepare.plan import PASSES
from megalite.data.prepare.prepare import finish, start
from megalite.utils.files import replace_file

from .conftest import digests_of, plan_of, run, texts_of, write_texts

pytest.importorskip("xxhash")

WORDS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=9).map(" ".join)
FILES = st.lists(st.lists(WORDS, max_size=12), min_size=1, max_size=4).filter(any)
BOTH: list[dict[str, Any]] = [{"exact": True}, {"minhash": {"ngram": 2, "bands": 3, "rows": 2}}]
if find_spec("rensa") is None:  # the rest of this file holds for exact alone as well
    del BOTH[1]
KINDS = [("exact",), ("minhash",), ("exact", "minhash")][: 2 * len(BOTH) - 1]


@contextmanager
def emptied(folder: Path) -> Iterator[Path]:
    """The folder, without what an earlier example left in it."""
    for name in ("in", "out"):
        shutil.rmtree(folder / name, ignore_errors=True)
    yield folder


def kept_texts(folder: Path, files: Sequence[Sequence[str]], **options: Any) -> list[str]:
    with emptied(folder):
        write_texts(folder / "in", files)
        run(plan_of(folder, **options))
        return texts_of(folder)


def keys_of(text: str, kinds: Sequence[str]) -> set[bytes]:
    """A document's keys, computed for it alone."""
    found = {row.tobytes() for row in exact_keys([text])} if "exact" in kinds else set()
    return found | ({row.tobytes() for row in band_keys([text], 2, 3, 2)[0]} if "minhash" in kinds else set())


def without_duplicates(texts: Sequence[str], kinds: Sequence[str]) -> list[str]:
    keys = [keys_of(text, kinds) for text in texts]
    return [text for i, text in enumerate(texts) if not any(keys[i] & keys[j] for j in range(i))]


@settings(max_examples=20, deadline=None)
@given(files=FILES, kinds=st.sampled_from(KINDS))
def test_a_document_goes_if_an_earlier_one_shares_a_key(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[str]], kinds: tuple[str, ...]
) -> None:
    steps = [step for step in BOTH if next(iter(step)) in kinds]
    texts = list(itertools.chain.from_iterable(files))
    kept = kept_texts(tmp_path_factory.getbasetemp() / "oracle", files, steps=steps)
    assert kept == without_duplicates(texts, kinds)


@settings(max_examples=10, deadline=None)
@given(files=FILES, more=st.lists(WORDS, max_size=8))
def test_a_second_run_removes_nothing_and_later_input_nothing_earlier(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[str]], more: list[str]
) -> None:
    base = tmp_path_factory.getbasetemp() / "again"
    kept = kept_texts(base, files, steps=BOTH)
    assert kept_texts(base, [kept], steps=BOTH) == kept
    assert kept_texts(base, [*files, more], steps=BOTH)[: len(kept)] == kept
    shuffled = kept_texts(base, files, steps=BOTH, shuffle=7, shards=3)
    assert sorted(shuffled) == sorted(kept)
    assert sorted(kept_texts(base, [shuffled], steps=BOTH)) == sorted(kept)


class Killed(Exception):
    pass


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_same_bytes_in_any_order_and_after_kills(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    base = tmp_path_factory.getbasetemp() / "kills"
    files = [[f"{a} {b} {a} {a}" for b in range(9)] for a in range(3)]
    options: dict[str, Any] = {"steps": BOTH, "shuffle": 3, "shards": 2}
    with emptied(base):
        write_texts(base / "in", files)
        run(plan_of(base, **options))
        whole = digests_of(base)
        assert len(whole) == 2 * 3 + 4
        shutil.rmtree(base / "out")
        plan = plan_of(base, **options)
        assert len(plan.pieces) > 3
        assert plan.num_ranges > 1
        start(plan, overwrite=False)
        for name in PASSES[:-1]:
            numbers = data.draw(st.permutations(range(plan.num_tasks(name))))
            lives = data.draw(st.lists(st.integers(0, 6), max_size=3))
            for number in numbers:
                while not plan.done_path(name, number).exists():
                    with pytest.MonkeyPatch.context() as patch:
                        if lives:
                            kill_at_file(patch, lives.pop())
                        try:
                            PassWorker(plan_of(base, **options))((name, number))
                        except Killed:
                            assert not plan.done_path(name, number).exists()
        finish(plan)
        assert digests_of(base) == whole


def kill_at_file(patch: pytest.MonkeyPatch, count: int) -> None:
    """End the process, so to speak, where it would write its n-th file from now on."""
    left = iter(range(count, -1, -1))

    def replace_or_die(path: Any) -> Any:
        if next(left, -1) == 0:
            raise Killed
        return replace_file(path)

    patch.setattr(passes, "replace_file", replace_or_die)
    patch.setattr(exchange, "replace_file", replace_or_die)


def test_processes_write_the_same_bytes(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", [[f"{a} {b} c" for b in range(20)] for a in range(3)])
    options: dict[str, Any] = {"steps": BOTH, "shuffle": 1, "shards": 3}
    run(plan_of(tmp_path, **options))
    one = digests_of(tmp_path)
    shutil.rmtree(tmp_path / "out")
    run(plan_of(tmp_path, **options), workers=2)
    assert digests_of(tmp_path) == one


def test_the_report_counts_groups_and_examples(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", [["a b", "c d", "a b"], ["a b", "e", "c d"]])
    report = run(plan_of(tmp_path, steps=[{"exact": True}]))
    (step,) = report["steps"]
    assert (step["documents_in"], step["documents_out"]) == (6, 3)
    assert (step["bytes_in"], step["bytes_out"]) == (16, 7)
    assert [(each["from"].rpartition("/")[2], each["text"]) for each in step["examples"]] == [
        ("000.jsonl line 3", "a b"),
        ("001.jsonl line 1", "a b"),
        ("001.jsonl line 3", "c d"),
    ]
    assert [(each["documents"], each["text"]) for each in report["duplicate_groups"]] == [
        (3, "a b"),
        (2, "c d"),
    ]
    assert report["output"]["documents"] == 3
    assert report["output"]["tokens"] == 7 + 3
