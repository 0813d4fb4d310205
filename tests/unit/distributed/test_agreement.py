"""Ranks that were started apart: who differs in what, said alike to all of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

import megalite
from megalite.distributed.agreement import REFUSED, check_agreement, code_record
from megalite.utils.errors import UserError

BASE = {"--lr": "0.0001", "--seed": "1234"}


def told(records: Sequence[Mapping[str, str] | None], store: dist.Store | None = None) -> list[str | None]:
    """What each rank raises; None where it goes on."""
    store = store or dist.HashStore()  # type: ignore[attr-defined]
    messages: list[str | None] = ["no answer"] * len(records)

    def come(rank: int) -> None:
        try:
            check_agreement(store, rank, len(records), records[rank], "start")
            messages[rank] = None
        except UserError as error:
            messages[rank] = str(error)

    threads = [threading.Thread(target=come, args=(rank,), daemon=True) for rank in range(len(records))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300.0)
    return messages


def message(records: Sequence[Mapping[str, str] | None]) -> str:
    """What all ranks raise alike."""
    (text,) = set(told(records))
    assert text is not None
    return text


def test_ranks_that_agree_go_on_and_are_asked_again() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    for seed in ("1", "2"):
        assert told([BASE | {"--seed": seed}] * 3, store) == [None] * 3
    assert set(told([BASE, BASE, BASE | {"--seed": "3"}], store)) == {
        "--seed differs between ranks: rank 2 has 3, the others 1234; start every rank with the same"
    }


def test_a_rank_with_nothing_to_compare_agrees() -> None:
    assert told([BASE, None, BASE]) == [None] * 3
    assert told([None, None]) == [None] * 2
    assert "rank 2 has 3, rank 0 has 1234" in message([BASE, None, BASE | {"--seed": "3"}])


def test_each_field_names_its_ranks_and_values() -> None:
    other, third = BASE | {"--lr": "0.0002"}, BASE | {"--lr": "0.0003", "--seed": "5"}
    assert message([other, BASE, other, third, BASE, BASE, BASE]).splitlines() == [
        "--lr differs between ranks: rank 3 has 0.0003, ranks 0, 2 have 0.0002, the others 0.0001; "
        "start every rank with the same",
        "--seed differs between ranks: rank 3 has 5, the others 1234; start every rank with the same",
    ]


def test_a_field_that_some_ranks_do_not_know() -> None:
    assert "--new differs between ranks: rank 1 has 3, rank 0 has nothing" in message(
        [BASE, BASE | {"--new": "3"}]
    )


def test_many_ranks_and_many_fields_are_shortened() -> None:
    many = [BASE] * 20 + [BASE | {"--lr": str(rank)} for rank in range(20)]
    text = message(many)
    assert "the others 0.0001" not in text  # what the ranks beyond the eighth kind have was not asked
    assert "ranks 0 to 19 have 0.0001" in text
    assert "ranks 27 to 39 differ too, in other ways" in text
    alternating = [BASE | {"--lr": str(rank % 2)} for rank in range(40)]
    assert "ranks 1, 3, 5, 7, 9, 11, 13, 15, … (20 in all) have 1" in message(alternating)
    names = {f"--flag-{number}": "1" for number in range(30)}
    lines = message([names, dict.fromkeys(names, "2")]).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "10 more settings differ between ranks"


def test_a_rank_that_refuses_its_flags_is_heard() -> None:
    refused = {REFUSED: "unknown flag --lrr; nearest is --lr"}
    assert message([BASE, BASE, refused]) == "rank 2 alone: unknown flag --lrr; nearest is --lr"


def test_the_code_is_known_by_its_version_and_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert code_record() == code_record()
    names = ("the version of megalite", "the version of torch")
    assert tuple(code_record()) == names
    records = []
    (tmp_path / "part").mkdir()
    for text in ("a = 1\n", "a = 2\n"):
        (tmp_path / "part" / "module.py").write_text(text)
        monkeypatch.setattr(megalite, "__file__", str(tmp_path / "__init__.py"))
        records.append(code_record())
    assert message(records).startswith("the version of megalite differs between ranks: rank 1 has")
