"""Averages of checkpoints equal the averages of their tensors, in any layout and precision."""

from pathlib import Path

import pytest
import torch

from megalite.checkpoint.convert.average import average, last_checkpoints, moving_average
from megalite.checkpoint.full_tensors import FullReader
from megalite.checkpoint.manifest import read_manifest
from megalite.checkpoint.progress import TrainingProgress
from megalite.cli.checkpoints import merge_checkpoints as main
from megalite.distributed.topology import Topology
from megalite.utils.errors import UserError
from tests.unit.checkpoint.convert.test_convert import save_stage, stage_of


def saved(folder: Path, one_rank: Topology, value: float, iteration: int = 7, dtype: str = "fp32") -> Path:
    """Save a model whose parameters all have this value."""
    stage = stage_of("llama", one_rank, dtype)
    for parameter in stage.parameters():
        parameter.data.fill_(value)
    return save_stage(stage, folder, progress=TrainingProgress(iteration, 10 * iteration))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    reader = FullReader(read_manifest(next(folder.glob("iter_*"))))
    return {name: reader.tensor(name) for name in reader.names()}


def values_of(folder: Path) -> set[float]:
    return {float(x) for tensor in weights_of(folder).values() for x in tensor.unique()}


@pytest.fixture
def run(tmp_path: Path, one_rank: Topology) -> Path:
    """The folder of a run with checkpoints of 1, 2, 4 and, later than `latest`, 100."""
    folder = tmp_path / "run"
    folder.mkdir()
    for iteration, value in ((9, 100.0), (1, 1.0), (2, 2.0), (5, 4.0)):
        part = saved(tmp_path / str(iteration), one_rank, value, iteration)
        (name,) = (entry.name for entry in part.glob("iter_*"))
        (part / name).rename(folder / name)
    (folder / "latest").write_text("iter_0000005\n")
    return folder


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--last", "2"), 3.0),
        (("--last", "3", "--weights", "0", "1", "1"), 3.0),
        (("--last", "3", "--weights", "2", "1", "1"), 2.0),
        (("--last", "3", "--ema-decay", "0.5"), 0.25 * 1 + 0.25 * 2 + 0.5 * 4),
        (("--last", "3", "--ema-decay", "0"), 4.0),
        ((), 4.0),  # the latest alone
    ],
)
def test_weights_of_the_checkpoints(flags: tuple[str, ...], expected: float, run: Path) -> None:
    main(["--load", str(run), *flags, "--save", str(run.parent / "mean")])
    assert values_of(run.parent / "mean") == {expected}
    description = read_manifest(run.parent / "mean" / "iter_0000005").description
    assert TrainingProgress.from_record(description["progress"]).iteration == 5


def test_sum_is_in_fp32_and_rounded_once(tmp_path: Path, one_rank: Topology) -> None:
    # 1 + 2 ** -7 is the next number after 1 in bf16: sums in bf16 would lose the third
    folders = [
        saved(tmp_path / str(i), one_rank, value, dtype="bf16")
        for i, value in enumerate((1.0, 1.0, 1.0 + 2**-7))
    ]
    average(folders, [1.0, 1.0, 1.0], tmp_path / "mean", "fp32")
    assert abs(values_of(tmp_path / "mean").pop() - (1.0 + 2**-7 / 3)) < 1e-7
    average(folders, [1.0, 1.0, 1.0], tmp_path / "rounded", None)
    assert {tensor.dtype for tensor in weights_of(tmp_path / "rounded").values()} == {torch.bfloat16}


def test_one_checkpoint_stays_as_it_is(tmp_path: Path, one_rank: Topology) -> None:
    folder = save_stage(stage_of("llama", one_rank, "bf16"), tmp_path / "one")
    average([folder, folder], [1.0, 3.0], tmp_path / "mean", None)
    before, after = weights_of(folder), weights_of(tmp_path / "mean")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_moving_average_has_shares_of_one() -> None:
    assert sum(moving_average(7, 0.9)) == pytest.approx(1.0)
    assert moving_average(1, 0.9) == [1.0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--last", "4"), "has only 3 checkpoints: pass a smaller number"),
        (("--last", "2", "--weights", "1"), "has 1 numbers for 2 checkpoints"),
        (("--last", "2", "--weights", "0", "0"), "not all 0"),
        (("--last", "2", "--weights", "nan", "1"), "not all 0"),
        (("--last", "2", "--ema-decay", "1"), "from 0 to below 1"),
        (("--last", "2", "--ema-decay", "0.5", "--weights", "1", "1"), "remove one"),
    ],
)
def test_bad_input(flags: tuple[str, ...], message: str, run: Path) -> None:
    with pytest.raises(UserError, match=message):
        main(["--load", str(run), *flags, "--save", str(run.parent / "mean")])
    assert not (run.parent / "mean").exists()


def test_other_models_are_refused(tmp_path: Path, one_rank: Topology) -> None:
    llama = saved(tmp_path / "llama", one_rank, 1.0)
    bloom = save_stage(stage_of("bloom", one_rank), tmp_path / "bloom")
    with pytest.raises(UserError, match=r"hold different models: .*position_embedding_type rope and alibi"):
        average([llama, bloom], [1.0, 1.0], tmp_path / "mean", None)
    with pytest.raises(UserError, match="for the folder of one run, not 2 folders"):
        main(["--load", str(llama), str(bloom), "--last", "2", "--save", str(tmp_path / "mean")])
    with pytest.raises(UserError, match="holds no checkpoint"):
        last_checkpoints(tmp_path / "none", 1)
    assert not (tmp_path / "mean").exists()
