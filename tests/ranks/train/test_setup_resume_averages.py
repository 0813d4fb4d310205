"""Averages of weights in checkpoints: resumed in any layout and precision, begun anew, or not used."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.checkpoint.manifest import read_manifest
from tests.ranks.train.test_setup_resume import (
    DP2_ZERO3,
    PP2,
    TP2,
    Tensors,
    main_of,
    names_of,
    run_of,
    saved_by,
    taken_by,
)

Saved = tuple[Path, Tensors]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Saved:
    """Two iterations of tp 2 with averages."""
    folder = tmp_path_factory.mktemp("averages")
    return folder, saved_by(run_of(folder, TP2, ema_decay=0.5))


def averages_of(tensors: Tensors) -> Tensors:
    return {name.removeprefix("ema."): each for name, each in tensors.items() if name.startswith("ema.")}


def assert_begun_anew(taken: Tensors) -> None:
    averages = averages_of(taken)
    assert averages.keys() == set(names_of(taken))
    assert all(average.equal(main_of(taken, name)) for name, average in averages.items())


@pytest.mark.parametrize(
    ("layout", "dtype"), [(PP2, "fp64"), pytest.param(DP2_ZERO3, "bf16", marks=pytest.mark.slow)]
)
def test_averages_are_resumed(saved: Saved, layout, dtype: str) -> None:
    folder, before = saved
    taken = taken_by(run_of(folder, layout, dtype, ema_decay=0.9))
    averages = averages_of(taken.tensors)
    assert averages.keys() == averages_of(before).keys()
    for name, average in averages_of(before).items():
        assert averages[name].equal(average.to(averages[name].dtype)), name
        assert not averages[name].equal(main_of(taken.tensors, name)), name


@pytest.mark.parametrize("changes", [{"finetune": True}, {"load_optim": False}], ids=str)
def test_without_the_optimizers_state_averages_begin_at_the_weights(saved: Saved, changes) -> None:
    folder, _ = saved
    assert_begun_anew(taken_by(run_of(folder, DP2_ZERO3, ema_decay=0.5, **changes)).tensors)


def test_a_run_may_begin_to_average_or_end_it(saved: Saved, tmp_path: Path) -> None:
    folder, before = saved
    without = taken_by(run_of(folder, PP2, save=str(tmp_path)), saves=True)
    assert without.tensors.keys() == {name for name in before if not name.startswith("ema.")}
    again = taken_by(run_of(tmp_path, TP2, ema_decay=0.5))
    assert_begun_anew(again.tensors)
    assert again.losses == pytest.approx(without.losses, rel=1e-2)


def test_a_save_without_the_optimizers_state_has_averages(tmp_path: Path) -> None:
    saved_by(run_of(tmp_path, TP2, ema_decay=0.5, save_optim=False))
    (checkpoint,) = tmp_path.glob("iter_*")
    tensors = read_manifest(checkpoint).tensors
    assert {name.partition(".")[0] for name in tensors} == {"model", "ema"}
    assert {pieces[0].dtype for name, pieces in tensors.items() if name.startswith("ema.")} == {"float32"}
