"""Non-persistent saves: loaded in any layout if the nodes have all parts, whole and newer."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest

from megalite.checkpoint import local_saves, peer_copies
from megalite.checkpoint.folder import iterations_in
from megalite.checkpoint.local_saves import LocalSaves
from megalite.checkpoint.saver import Saver
from megalite.config import Config, DataConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.train.trainer import start_trainer
from megalite.utils.errors import UserError
from megalite.utils.log import log
from tests.live_ranks import run_ranks
from tests.ranks.checkpoint.saving import (
    config_of,
    contents_of,
    full_disk,
    loaded,
    parallel,
    state,
    writer,
)


def local_config(folder: Path, **fields) -> Config:
    return config_of(
        folder / "save",
        non_persistent_save_interval=1,
        non_persistent_local_ckpt_dir=str(folder / "local"),
        **fields,
    )


def iterations_of(saver: Saver) -> list[int]:
    """The iterations of a rank's parts, once the first rank of the node has deleted old ones."""
    with saver.local.topology.agreed():
        pass
    return list(iterations_in(saver.local.folder))


def save(topology, config: Config) -> None:
    """A persistent save of iteration 10, others of 11 and 12, and one of 13 that rank 1 fails."""
    with Saver(config.checkpoint, topology).training_from(0) as saver:
        saver.save(contents_of(config, topology, 10), state(topology, 1.0))
        for iteration, value in ((11, 1.5), (12, 2.0)):
            saver.finish()
            saver.save_local(contents_of(config, topology, iteration), state(topology, value))
            saver.finish()
            assert iterations_of(saver) == [iteration]
        with writer(full_disk) if topology.rank == 1 else nullcontext():
            saver.save_local(contents_of(config, topology, 13), state(topology, 3.0))
            saver.finish()
        assert iterations_of(saver) == [12]


def load(topology, config: Config) -> tuple[int, float] | None:
    saver = Saver(config.checkpoint, topology)
    found = loaded(topology, config, saver)
    with saver.training_from(found[0] if found else 0):
        kept = found is not None and found[0] == 12 and topology.rank < 2
        assert iterations_of(saver) == ([12] if kept else [])
    return found


def rank_folder(folder: Path, rank: int) -> Path:
    (run,) = (folder / "local").iterdir()
    return run / f"rank_{rank:05d}" / "iter_0000012"


def flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def flip(folder: Path) -> None:
    flip_bit(rank_folder(folder, 1) / "rank_00001.safetensors")


def as_copied(folder: Path) -> None:
    """The folder is a copy of the one that the run saved to, as of another run that continues from it."""
    (folder / "save").rename(folder / "original")
    shutil.copytree(folder / "original", folder / "save")


def as_moved(folder: Path) -> None:
    (folder / "save").rename(folder / "elsewhere")
    (folder / "elsewhere").rename(folder / "save")


CHANGES = {
    "nothing": (lambda folder: None, (12, "same")),
    "a bit": (flip, (10, "same")),
    "a lost node": (lambda folder: rank_folder(folder, 1).rename(folder / "elsewhere"), (10, "same")),
    "cut short": (lambda folder: os.truncate(rank_folder(folder, 0) / "run.json", 30), (10, "same")),
    "another run": (lambda folder: (folder / "save" / "run_id").unlink(), (10, "same")),
    "a copied run": (as_copied, (10, "same")),
    "a moved run": (as_moved, (12, "same")),
    "more ranks": (lambda folder: None, (12, parallel(dp=4))),
    "fewer ranks": (lambda folder: None, (12, parallel())),
    "another layout": (lambda folder: None, (12, parallel(tp=2))),
}


@pytest.mark.parametrize(("kind", "is_async"), [*((kind, False) for kind in CHANGES), ("nothing", True)])
def test_the_newest_that_every_rank_has_whole_is_loaded(tmp_path: Path, kind: str, is_async: bool) -> None:
    (tmp_path / "save").mkdir()
    config = local_config(tmp_path, async_save=is_async)
    change, (iteration, layout) = CHANGES[kind]
    here = parallel(dp=2)
    run_ranks(save, here.mesh, 2, config)
    change(tmp_path)
    (run,) = (tmp_path / "local").iterdir()
    killed = run / "rank_00007"  # was a rank of this node before another restart
    (killed / f".iter_0000011.{'0' * 16}.partial").mkdir(parents=True)
    there = here if layout == "same" else layout
    assert isinstance(there, ParallelConfig)
    world_size = there.tensor_model_parallel_size * (there.data_parallel_size or 1)
    found = run_ranks(load, there.mesh, world_size, config)
    assert found == [(iteration, {10: 1.0, 12: 2.0}[iteration])] * world_size
    assert killed.exists() == (kind in ("another run", "a copied run"))


def on_node(config: Config, node: int, num_copies: int, **fields) -> Config:
    """The config of a rank on a node, whose folder only its ranks see."""
    folder = f"{config.checkpoint.non_persistent_local_ckpt_dir}/{node}"
    checkpoint = dataclasses.replace(
        config.checkpoint, non_persistent_local_ckpt_dir=folder, peer_copies=num_copies, **fields
    )
    return dataclasses.replace(config, checkpoint=checkpoint)


def save_on_nodes(topology, config: Config) -> None:
    """A save of iteration 12 with a copy on the other of two nodes; one of 13 that rank 1 cannot store."""
    config = on_node(config, topology.rank, 1)
    with Saver(config.checkpoint, topology).training_from(0) as saver:
        saver.save(contents_of(config, topology, 10), state(topology, 1.0))
        saver.finish()
        saver.save_local(contents_of(config, topology, 12), state(topology, 2.0))
        saver.finish()
        full = mock.patch.object(peer_copies, "_receive", side_effect=OSError(28, "No space left on device"))
        with full if topology.rank == 1 else nullcontext(), mock.patch.object(log, "warning") as warning:
            saver.save_local(contents_of(config, topology, 13), state(topology, 3.0))
            saver.finish()
        assert "copied (rank 1: No space left on device): nodes must reach each" in str(warning.mock_calls)
        found = {str(each.relative_to(saver.local.root)) for each in saver.local.root.rglob("*.safetensors")}
        assert found == {f"rank_0000{rank}/iter_0000012/rank_0000{rank}.safetensors" for rank in range(2)}
        assert not list(saver.local.root.rglob(".*"))


def load_on_nodes(topology, config: Config, nodes: list[int]) -> tuple[int, float] | None:
    config = on_node(config, nodes[topology.rank], len(set(nodes)) - 1)
    return loaded(topology, config, Saver(config.checkpoint, topology))


def lose(folder: Path, node: int) -> None:
    shutil.rmtree(folder / "local" / str(node))


def spoil(folder: Path, node: int) -> None:
    """Damage the part of rank 1 on a node."""
    (file,) = (folder / "local" / str(node)).rglob("rank_00001.safetensors")
    flip_bit(file)


def spoil_text(folder: Path, node: int) -> None:
    (file,) = (folder / "local" / str(node)).glob("*/rank_00001/*/run.json")
    os.truncate(file, 30)


LOSSES = {
    "nothing": ([], [0, 1], 12),
    "a node": ([(lose, 0)], [0, 1], 12),
    "a part": ([(spoil, 1)], [0, 1], 12),
    "a text and the other node": ([(spoil_text, 1), (lose, 0)], [0, 1], 10),
    "both copies of a part": ([(spoil, 0), (spoil, 1)], [0, 1], 10),
    "both nodes": ([(lose, 0), (lose, 1)], [0, 1], 10),
    "a node that is not replaced": ([(lose, 1)], [0], 12),
    "a node that two ranks replace": ([(lose, 0)], [0, 0, 1, 1], 12),
}


@pytest.mark.parametrize(("kind", "is_async"), [*((kind, False) for kind in LOSSES), ("a node", True)])
def test_a_copy_on_another_node_replaces_a_lost_part(tmp_path: Path, kind: str, is_async: bool) -> None:
    (tmp_path / "save").mkdir()
    config = local_config(tmp_path, async_save=is_async)
    run_ranks(save_on_nodes, parallel(dp=2).mesh, 2, config)
    losses, nodes, iteration = LOSSES[kind]
    for fault, node in losses:
        fault(tmp_path, node)
    found = run_ranks(load_on_nodes, parallel(dp=len(nodes)).mesh, len(nodes), config, nodes)
    assert found == [(iteration, {10: 1.0, 12: 2.0}[iteration])] * len(nodes)


def start_on_one_node(topology, config: Config) -> str:
    with pytest.raises(UserError) as error:
        Saver(on_node(config, 0, 1).checkpoint, topology)
    return str(error.value)


def test_copies_on_the_same_node_are_refused(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    first, second = run_ranks(start_on_one_node, parallel(dp=2).mesh, 2, local_config(tmp_path))
    assert first == second
    assert "--peer-copies 1 needs 2 nodes, and the ranks see 1 folder for non-persistent saves" in first


def keepers_in_domains(topology, config: Config, file: Path) -> list[int] | str:
    """The ranks that keep copies; every rank is a node, and ranks 0 and 2 are in the same rack."""
    config = on_node(config, topology.rank, 1, peer_domains=str(file))
    with mock.patch.object(socket, "gethostname", return_value=f"n{topology.rank}"):
        try:
            return LocalSaves.of(config.checkpoint, topology).copies.to
        except UserError as error:
            return str(error)


def test_copies_are_in_other_domains(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    file, config = tmp_path / "domains", local_config(tmp_path)
    file.write_text("n0 even\nn1 odd\nn2 even\nn3 odd\n")
    to = run_ranks(keepers_in_domains, parallel(dp=4).mesh, 4, config, file)
    assert [each % 2 for (each,) in to] == [1, 0, 1, 0]
    file.write_text("n0 even\nn1 odd\nn3 odd\n")
    said = run_ranks(keepers_in_domains, parallel(dp=4).mesh, 4, config, file)
    assert said == [f"--peer-domains {file} has no line for n2: write one for each host"] * 4


def restart_on_one_node(
    topology, config: Config, iteration: int, num_restarts: str = "0"
) -> tuple[list[int], tuple[int, float] | None]:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = num_restarts
    config = on_node(config, 0, 1)
    saver = Saver(config.checkpoint, topology)
    found = loaded(topology, config, saver)
    saver.save_local(contents_of(config, topology, iteration), state(topology, 3.0))
    return iterations_of(saver), found


def test_a_run_that_restarts_on_fewer_nodes_makes_fewer_copies(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    config = local_config(tmp_path)
    run_ranks(save_on_nodes, parallel(dp=2).mesh, 2, config)
    lose(tmp_path, 1)
    assert run_ranks(restart_on_one_node, parallel(dp=2).mesh, 2, config, 15) == [([15], (12, 2.0))] * 2


def test_a_run_without_these_saves_restarts_on_fewer_nodes(tmp_path: Path) -> None:
    """It is a restart if torchrun says so, or if there is a persistent checkpoint."""
    (tmp_path / "save").mkdir()
    config = local_config(tmp_path)
    found = run_ranks(restart_on_one_node, parallel(dp=2).mesh, 2, config, 15, "1")
    assert found == [([15], None)] * 2
    shutil.rmtree(tmp_path / "local")
    run_ranks(save_on_nodes, parallel(dp=2).mesh, 2, config)
    shutil.rmtree(tmp_path / "local")
    assert run_ranks(restart_on_one_node, parallel(dp=2).mesh, 2, config, 15) == [([15], (10, 1.0))] * 2


def test_parts_of_two_saves_of_an_iteration_are_not_mixed(tmp_path: Path) -> None:
    """A node comes back with a part of a save that the others have lost and made again."""
    (tmp_path / "save").mkdir()
    config = local_config(tmp_path)
    run_ranks(save_on_nodes, parallel(dp=2).mesh, 2, config)
    (tmp_path / "local" / "1").rename(tmp_path / "away")
    (of_rank_0,) = (tmp_path / "away").glob("*/rank_00000")
    shutil.rmtree(of_rank_0)
    run_ranks(restart_on_one_node, parallel(dp=2).mesh, 2, config, 12)
    (tmp_path / "away").rename(tmp_path / "local" / "1")
    assert run_ranks(load_on_nodes, parallel(dp=2).mesh, 2, config, [0, 1]) == [(12, 3.0)] * 2


def space(topology, config: Config, num_bytes: int) -> list[str]:
    saves = LocalSaves.of(on_node(config, topology.rank, 1).checkpoint, topology)
    with (
        mock.patch.object(shutil, "disk_usage", return_value=mock.Mock(free=num_bytes)),
        mock.patch.object(local_saves.log, "warning") as warning,
        mock.patch.object(local_saves.log, "info") as info,
    ):
        saves.check_space(state(topology, 1.0))
    return [call.args[0] % call.args[1:] for each in (info, warning) for call in each.call_args_list]


def test_the_space_on_a_node_is_checked(tmp_path: Path) -> None:
    """Each rank has half of 24 fp32 and 10 bf16 elements and its fp64 moments, rank 0 also the count."""
    (tmp_path / "save").mkdir()
    config = local_config(tmp_path)
    needed = 2 * (24 * 4 + 10 * 2 + 24 * 8 + 4)
    enough, *_ = run_ranks(space, parallel(dp=2).mesh, 2, config, needed)
    assert len(enough) == 1
    _, warning = run_ranks(space, parallel(dp=2).mesh, 2, config, needed - 1)[0]
    assert "--non-persistent-local-ckpt-dir has 0.000 GB for non-persistent saves on 2 nodes" in warning
    assert warning.endswith("pass a folder with more space, or fewer --peer-copies")


def supersede(topology, config: Config) -> list[list[int]]:
    """What a rank has after a persistent save that is not the last, and after one that is."""
    saver = Saver(config.checkpoint, topology)
    assert saver.local is not None
    seen = []
    for iteration, is_last in ((20, False), (40, True)):
        saver.save_local(contents_of(config, topology, iteration - 1), state(topology, 1.0))
        saver.save(contents_of(config, topology, iteration), state(topology, 2.0), is_last=is_last)
        saver.finish()
        seen.append(iterations_of(saver))
    return seen


def test_a_persistent_save_makes_them_superfluous(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    config = local_config(tmp_path, async_save=True)
    assert run_ranks(supersede, parallel(dp=2).mesh, 2, config) == [[[], []]] * 2
    assert not list((tmp_path / "local").iterdir())


def load_older(topology, config: Config) -> tuple[int, float] | None:
    saver = Saver(config.checkpoint, topology)
    saver.save_local(contents_of(config, topology, 10), state(topology, 1.0))
    saver.save(contents_of(config, topology, 20), state(topology, 2.0))
    saver.save_local(contents_of(config, topology, 15), state(topology, 1.5))
    return loaded(topology, config, saver)


def test_a_newer_persistent_one_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    assert run_ranks(load_older, parallel().mesh, 1, local_config(tmp_path)) == [(20, 2.0)]


def run_config(folder: Path, way: tuple[int, int, int, str], is_async: bool) -> Config:
    pp, dp, stage, dtype = way
    model = dataclasses.replace(PRESETS["gpt-tiny"], num_layers=2, vocab_size=100, seq_length=16)
    return dataclasses.replace(
        local_config(folder, async_save=is_async),
        model=dataclasses.replace(model, params_dtype=dtype),
        parallel=ParallelConfig(1, pp, dp, zero_stage=stage, overlap_param_gather=stage in (1, 2)),
        optimizer=OptimizerConfig(initial_loss_scale=2.0**20, hysteresis=1, lr=1e-2),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(micro_batch_size=2, global_batch_size=8, train_iters=9, eval_iters=0),
    )


def train_on_nodes(topology, config: Config, num_copies: int, resumes: bool) -> tuple[int, list[float]]:
    return train(topology, on_node(config, topology.rank, num_copies), resumes)


def test_a_run_goes_on_in_another_layout_without_a_node(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    first = run_config(tmp_path, (1, 2, 1, "fp64"), is_async=True)
    later = dataclasses.replace(first, parallel=parallel())
    undisturbed, *_ = run_ranks(train_on_nodes, first.parallel.mesh, 2, first, 1, False)
    lose(tmp_path, 1)
    ((iteration, losses),) = run_ranks(train_on_nodes, later.parallel.mesh, 1, later, 0, True)
    assert iteration == 3
    assert losses == pytest.approx(undisturbed[1], rel=1e-12)


def train(topology, config: Config, resumes: bool) -> tuple[int, list[float]]:
    """Three iterations and a save, or what it saved; then the losses of three more."""
    with start_trainer(config, topology) as trainer:
        if resumes:
            assert trainer.load()
        first = trainer.progress.iteration
        with trainer.saver.training_from(first):
            if not resumes:
                for _ in range(3):
                    trainer.step()
                trainer.save_local()
            losses = [trainer.step().loss for _ in range(3)]
            trainer.saver.finish()
        return first, losses


@pytest.mark.parametrize(
    "way",
    [
        (1, 2, 0, "fp32"),
        (2, 1, 0, "fp16"),
        pytest.param((1, 2, 1, "bf16"), marks=pytest.mark.slow),
        pytest.param((1, 2, 2, "fp16"), marks=pytest.mark.slow),
        pytest.param((1, 2, 3, "bf16"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_goes_on_bitwise(tmp_path: Path, way: tuple[int, int, int, str]) -> None:
    """With the loss scale at its start, the word table on two stages, and parts of what ZeRO shares out."""
    (tmp_path / "save").mkdir()
    config = run_config(tmp_path, way, is_async=True)
    undisturbed = run_ranks(train, config.parallel.mesh, 2, config, False)
    resumed = run_ranks(train, config.parallel.mesh, 2, config, True)
    assert [first for first, _ in resumed] == [3, 3]
    assert [losses for _, losses in resumed] == [losses for _, losses in undisturbed]
