#!/usr/bin/env python
"""Time how long a save blocks training and how long a load takes, as ratios to torch.save and torch.load.

python benchmarks/checkpoint.py --gigabytes 1 --folder /scratch

One rank saves a state of weights and two moments in fp32. Each round runs all actions in turns, on a disk
that has nothing else to write, so that other processes slow all of them; the ratios are ratios of medians.
megalite hashes and syncs its files, and hashes them again when loading. torch.save leaves its file in the
page cache, unless synced. A save in the background blocks training when the save begins, and before the next
update until the copy is complete: measured after a second of computation, and without computation. A load
ends when the tensors are filled: torch.load reads from the page cache, megalite from the disk if files were
written to it directly.

Two ranks in two threads send each other copies of the last checkpoint, as --peer-copies does, beside shutil's
copies of the same files: with --folder /dev/shm, in memory.

python benchmarks/checkpoint.py --url s3://bucket/run

also saves to a store, and compares the upload with obstore's put of a file of the same size, and a second of
computation during the upload with one during a save in the background to the disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.load import load_checkpoint
from megalite.checkpoint.peer_copies import PeerCopies
from megalite.checkpoint.progress import TrainingProgress
from megalite.checkpoint.save import Contents
from megalite.checkpoint.saver import Saver
from megalite.config import CheckpointConfig, Config, ModelConfig, ParallelConfig, TrainingConfig
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.parameter_spec import ParameterShard, ParameterSpec
from megalite.utils.log import log

NUM_LAYERS = 24


def state_of(num_bytes: int) -> dict[str, Tensor | ParameterShard]:
    """Return weights and moments of square matrices, as views of three flat tensors like the optimizer's."""
    size = int((num_bytes / 4 / 3 / NUM_LAYERS) ** 0.5)
    spec = ParameterSpec((size, size))
    state: dict[str, Tensor | ParameterShard] = {"optimizer.num_steps": torch.tensor(3.0)}
    for what in ("model.{}.weight", "optimizer.{}.weight.exp_avg", "optimizer.{}.weight.exp_avg_sq"):
        flat = torch.randn(NUM_LAYERS * size * size)
        for layer, elements in enumerate(flat.split(size * size)):
            name = what.format(f"layers.{layer}.mlp")
            state[name] = ParameterShard(elements, 0, (size, size), spec, is_replicated=True)
    return state


def plain(state: dict[str, Tensor | ParameterShard]) -> dict[str, Tensor]:
    """Return copies of these tensors for torch.save."""
    return {
        name: each.tensor.view(each.shape) if isinstance(each, ParameterShard) else each
        for name, each in state.items()
    }


class Bench:
    """The timed actions, on one state in one folder."""

    def __init__(
        self, folder: Path, state: dict[str, Tensor | ParameterShard], topology: Topology, url: str | None
    ) -> None:
        self.file = folder / "state.pt"
        self.copies = folder / "copies"
        self.state, self.topology = state, topology
        self.plain = plain(state)
        self.config = Config(
            model=ModelConfig(num_layers=NUM_LAYERS, vocab_size=50),
            training=TrainingConfig(train_iters=10),
            checkpoint=CheckpointConfig(save=str(folder / "run"), load=str(folder / "run")),
        )
        (folder / "run").mkdir()
        self.iteration = 0
        self.matrix, self.product = torch.randn(1024, 1024), torch.empty(1024, 1024)
        self.num_products = 1
        self.num_products = max(1, int(1 / min(seconds(self.compute) for _ in range(5))))
        self.sync = Saver(self.config.checkpoint, topology)
        self.background = Saver(dataclasses.replace(self.config.checkpoint, async_save=True), topology)
        self.peers = [PeerCopies(rank, (0, 1), 1) for rank in range(2)]
        self.url = url
        if url is not None:
            stored = CheckpointConfig(save=url, save_stage=str(folder), keep_last=1)
            self.stored = Saver(stored, topology)

    def store(self) -> None:
        """Save to the store; the upload goes on."""
        self.stored.save(self.next(), self.state)

    def put(self) -> None:
        """Put the file of `torch_save` into the store as obstore does by default."""
        import obstore

        bucket, _, path = str(self.url).removeprefix("s3://").partition("/")
        endpoint = os.environ.get("AWS_ENDPOINT_URL")
        options = {"endpoint": endpoint, "client_options": {"allow_http": True}} if endpoint else {}
        obstore.put(obstore.store.S3Store(bucket, **options), f"{path}/state.pt", self.file)

    def torch_save(self) -> None:
        torch.save(self.plain, self.file)

    def torch_save_synced(self) -> None:
        with self.file.open("wb") as stream:
            torch.save(self.plain, stream)
            stream.flush()
            os.fsync(stream.fileno())

    def torch_load(self) -> None:
        for name, tensor in torch.load(self.file, weights_only=True).items():
            self.plain[name].copy_(tensor)

    def clear(self) -> None:
        """Delete the written files, so that the next action has an empty disk."""
        self.file.unlink(missing_ok=True)
        for folder in self.file.parent.glob("run/iter_*"):
            shutil.rmtree(folder)

    def next(self) -> Contents:
        """Return a new iteration number, so that no checkpoint is replaced."""
        self.iteration += 1
        return Contents.of(TrainingProgress(self.iteration, 1), self.config, self.topology)

    def save(self) -> None:
        self.sync.save(self.next(), self.state)

    def compute(self) -> None:
        """Compute matrix products for about a second, in one thread."""
        for _ in range(self.num_products):
            torch.mm(self.matrix, self.matrix, out=self.product)

    def begin(self) -> None:
        self.background.save(self.next(), self.state)

    def before_update(self) -> None:
        self.background.before_update()

    def begin_and_wait(self) -> None:
        """Begin a save and wait for the whole copy, without computation."""
        self.begin()
        self.before_update()

    def finish(self) -> None:
        self.background.finish()

    def exchange(self) -> None:
        """Send a copy of the last checkpoint from each of two ranks to the other."""
        pair, part, copies = self.peers, self.last_checkpoint(), self.copies
        addresses = [each.open_inbox() for each in pair]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda rank: pair[rank].exchange(addresses, part, [copies / str(rank)]), range(2)))

    def copy_twice(self) -> None:
        """Copy the last checkpoint twice."""
        for number in range(2):
            shutil.copytree(self.last_checkpoint(), self.copies / f"by shutil {number}")

    def last_checkpoint(self) -> Path:
        return max(self.file.parent.glob("run/iter_*"))

    def load(self) -> None:
        folder = Path(self.config.checkpoint.load or "")
        assert load_checkpoint(folder, self.state, self.config, self.topology)


def seconds(action: Callable[[], object]) -> float:
    """Return the seconds of an action, once the disk is idle."""
    os.sync()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(bench: Bench, num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each action in each round."""
    times: dict[str, list[float]] = {}

    def time_of(name: str, action: Callable[[], object]) -> None:
        times.setdefault(name, []).append(seconds(action))

    for _ in range(num_rounds):
        for name, torch_save, save in (
            ("torch.save", bench.torch_save, bench.save),
            ("torch.save and fsync", bench.torch_save_synced, bench.save),
        ):
            bench.clear()
            time_of(name, torch_save)
            time_of("sync save", save)
        begun = seconds(bench.begin)
        bench.compute()
        start = time.perf_counter()
        bench.before_update()
        times.setdefault("async: stands still", []).append(begun + time.perf_counter() - start)
        bench.background.finish()
        time_of("async: with nothing computed", bench.begin_and_wait)
        time_of("async: then written in", bench.background.finish)
        time_of("torch.load", bench.torch_load)
        time_of("load", bench.load)
        shutil.rmtree(bench.copies, ignore_errors=True)
        bench.copies.mkdir()
        begun = time.process_time()
        time_of("peer copies", bench.exchange)
        times.setdefault("peer copies: processor", []).append(time.process_time() - begun)
        time_of("copies by shutil", bench.copy_twice)
        if bench.url is not None:
            bench.torch_save()
            time_of("store: put of a file", bench.put)
            bench.store()
            time_of("store: upload", bench.stored.finish)
            for name, begin, finish in (
                ("async: compute", bench.begin, bench.background.finish),
                ("store: compute", bench.store, bench.stored.finish),
            ):
                begin()
                start = time.perf_counter()
                bench.compute()
                times.setdefault(name, []).append(time.perf_counter() - start)
                finish()
    return times


def report(times: dict[str, list[float]], num_bytes: int) -> None:
    """Print medians of the rounds, and their ratios."""
    medians = {name: statistics.median(each) for name, each in times.items()}
    print(f"{num_bytes / 1e9:.2f} GB, medians of {len(times['load'])} rounds:")
    for name, each in times.items():
        print(f"  {name:30s} {medians[name]:7.3f} s   (of {min(each):.3f} to {max(each):.3f})")
    for name, above, below in (
        ("sync save / torch.save", "sync save", "torch.save"),
        ("sync save / torch.save and fsync", "sync save", "torch.save and fsync"),
        ("async stand-still / sync save", "async: stands still", "sync save"),
        ("  with nothing to compute", "async: with nothing computed", "sync save"),
        ("load / torch.load", "load", "torch.load"),
        ("two peer copies / two by shutil", "peer copies", "copies by shutil"),
        ("rate of upload / of put", "store: put of a file", "store: upload"),
        ("compute during upload / async save", "store: compute", "async: compute"),
    ):
        if above in medians:
            print(f"{name:34s} {medians[above] / medians[below]:6.3f}")


def main() -> None:
    """Measure and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the state (default 1)")
    parser.add_argument("--rounds", type=int, default=5, help="times that each is done (default 5)")
    parser.add_argument(
        "--folder", type=Path, help="where to write; by default the system's for temporary files"
    )
    parser.add_argument("--url", help="also save to this prefix in S3")
    arguments = parser.parse_args()
    log.setLevel(logging.WARNING)
    torch.set_num_threads(1)
    state = state_of(int(arguments.gigabytes * 1e9))
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in plain(state).values())
    folder = Path(tempfile.mkdtemp(prefix="megalite-checkpoint-", dir=arguments.folder))
    try:
        with Topology.start(ParallelConfig(distributed_backend="gloo").mesh, Launch(0, 1, 0, 1)) as topology:
            times = measure(Bench(folder, state, topology, arguments.url), arguments.rounds)
    finally:
        shutil.rmtree(folder)
    report(times, num_bytes)


if __name__ == "__main__":
    main()
