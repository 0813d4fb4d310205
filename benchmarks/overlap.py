#!/usr/bin/env python
"""Share of the communication that hides under compute, on two ranks over a 1-Gbit link.

sudo python benchmarks/overlap.py

Two network namespaces of this machine are joined by a link that `tc` slows to the given rate, a rank of one
thread in each. In turns are timed, with one model and batch: a step that communicates with nobody, the
communication alone, and steps with overlap off and on. Hidden is the share of the communication during which
the step did not stand still for it:

    hidden = 1 - waited in a step with overlap / communication alone

and "saved" is what is left of it by the clock, (off - on) / communication alone: less where the cores that
compute also carry the messages, as two cores for two ranks do.

Tensor-parallel collectives cannot run without the step, so nothing runs alone in those rows. Some of them
hide even without the flag; hidden is the share of the remaining wait:

    hidden = 1 - waited in a step with overlap / waited in a step without

Needs root, ip and tc (iproute2). A variant that this megalite has no flags for is skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from rank_turns import ForeignCPU

from megalite.config import Config, check_config
from megalite.distributed.axis import Axis
from megalite.distributed.collectives import flat_all_gather, flat_reduce_scatter
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.frontends.command_line import parse
from megalite.train.trainer import Trainer, start_trainer
from megalite.utils.errors import ConfigError, UserError

NUM_RANKS = 2
BUSY = 0.1
ROW = "{:<30} {:>8} {:>9} {:>7} {:>7} {:>11} {:>7} {:>7} {:>6} {:>12}"


@dataclass(frozen=True)
class Variant:
    """A way to overlap.

    Attributes:
        off, on: megalite's flags without and with overlap.
        sharded: gradients are reduce-scattered and weights all-gathered; else gradients are all-reduced.
        axis: axis of the two ranks, dp or tp.
    """

    off: str
    on: str
    sharded: bool = False
    axis: str = "dp"


OFF, ON = "--no-overlap-grad-reduce", "--overlap-grad-reduce"
IN_PARTS = "--tp-comm-overlap --tp-comm-overlap-chunks 2"
ZERO1 = "--zero-stage 1 --no-overlap-param-gather"
VARIANTS = {
    "dp2, gradients": Variant(OFF, ON, sharded=False),
    "zero1, gradients": Variant(f"{ZERO1} {OFF}", f"{ZERO1} {ON}", sharded=True),
    "zero1, gradients and weights": Variant(
        f"{ZERO1} {OFF}", f"--zero-stage 1 {ON} --overlap-param-gather", sharded=True
    ),
    "tp2, all-reduces": Variant("--tp 2", f"--tp 2 {IN_PARTS}", axis="tp"),
    "tp2, sequence parallel": Variant(
        "--tp 2 --sequence-parallel", f"--tp 2 --sequence-parallel {IN_PARTS}", axis="tp"
    ),
}


class Times(NamedTuple):
    """Seconds of one round.

    Attributes:
        compute, communication: each alone; NaN on tp.
        waited_off, waited: seconds of a step without and with overlap in which it waited for messages.
        foreign: share of the cores that others used meanwhile.
    """

    compute: float
    communication: float
    off: float
    on: float
    waited_off: float
    waited: float
    foreign: float

    @property
    def messages(self) -> float:
        """Seconds of the communication that overlap could hide."""
        return self.waited_off if math.isnan(self.communication) else self.communication


class Waits:
    """Counts the seconds in which this rank's program waits for messages."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._wait = dist.Work.wait

    @contextmanager
    def counted(self) -> Iterator[None]:
        def wait(work: dist.Work, *timeout: timedelta) -> bool:
            start = time.perf_counter()
            done = self._wait(work, *timeout)
            self.seconds += time.perf_counter() - start
            return done

        with patch.object(dist.Work, "wait", wait):
            yield


def main() -> int:
    """Make the link, runs the ranks over it and prints a row for each variant."""
    args = parse_arguments()
    if args.results:  # one of the two ranks
        run_rank(args)
        return 0
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        print("overlap.py makes network namespaces: run it as root where ip and tc (iproute2) are installed")
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what cleans up
    try:
        with tempfile.TemporaryDirectory() as folder, slow_link(args.rate) as namespaces:
            results = Path(folder) / "results.json"
            if run_in(namespaces, __file__, ["--results", str(results), *sys.argv[1:]]):
                return 1  # the rank has said why
            print_table(json.loads(results.read_text()), args)
    except subprocess.CalledProcessError as error:
        print(f"this machine lets nobody make the link: {' '.join(error.cmd)} failed")
        return 1
    return 0


@contextmanager
def slow_link(rate: str) -> Iterator[list[str]]:
    """Two network namespaces, joined by a link of that rate both ways; they go at the end."""
    names = [f"megalite{os.getpid()}r{rank}" for rank in range(NUM_RANKS)]
    try:
        for name in names:
            _run(f"ip netns add {name}")
        _run(f"ip link add veth0 netns {names[0]} type veth peer name veth0 netns {names[1]}")
        for rank, name in enumerate(names):
            inside = f"ip netns exec {name}"
            _run(f"{inside} ip addr add {_address(rank)}/24 dev veth0")
            for device in ("veth0", "lo"):  # rank 0 reaches itself through lo
                _run(f"{inside} ip link set {device} up")
            _run(f"{inside} tc qdisc add dev veth0 root tbf rate {rate} burst 256kb latency 100ms")
        yield names
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "delete", name), capture_output=True, check=False)


def layer_parser(description: str) -> argparse.ArgumentParser:
    """Return the parser of a benchmark that times one layer on two ranks over a slow link."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc writes it")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3, help="steps of one turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--is-rank", action="store_true", help=argparse.SUPPRESS)
    return parser


def run_over_slow_link(
    parser: argparse.ArgumentParser, program: str, run_rank: Callable[[argparse.Namespace], None]
) -> int:
    """Make the link and run the program on both ranks, or `run_rank` in one of them."""
    args = parser.parse_args()
    if args.is_rank:
        run_rank(args)
        return 0
    with slow_link(args.rate) as namespaces:
        return int(run_in(namespaces, program, ["--is-rank", *sys.argv[1:]]))


def run_in(namespaces: Sequence[str], program: str, arguments: Sequence[str]) -> bool:
    """Run a program in each namespace, as the ranks of one world; gives whether one failed."""
    ranks = []
    for rank, name in enumerate(namespaces):
        world = {
            "RANK": rank,
            "WORLD_SIZE": len(namespaces),
            "MASTER_ADDR": _address(0),
            "MASTER_PORT": 29500,  # nobody else is in the namespace
            "GLOO_SOCKET_IFNAME": "veth0",
            "OMP_NUM_THREADS": 1,
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        environment = os.environ | {key: str(value) for key, value in world.items()}
        command = ("ip", "netns", "exec", name, sys.executable, program, *arguments)
        ranks.append(subprocess.Popen(command, env=environment))
    try:
        while all(process.poll() is None for process in ranks):
            time.sleep(0.2)
        return any(process.poll() for process in ranks) or any(process.wait() for process in ranks)
    finally:
        for process in ranks:
            process.kill()


def _address(rank: int) -> str:
    return f"10.231.0.{rank + 1}"


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def run_rank(args: argparse.Namespace) -> None:
    """Measure every variant; rank 0 writes the rounds, or in words why there are none."""
    results: dict[str, list[Times] | str] = {}
    launch = Launch.from_environment()
    config = config_of(args, "")
    with Topology.start(config.parallel.mesh, launch) as topology:
        for name in args.variants.split(";"):
            if launch.rank == 0:
                print(f"measuring {name}", file=sys.stderr, flush=True)
            try:
                results[name] = measure(VARIANTS[name], topology, args)
            except (ConfigError, UserError) as error:
                results[name] = " ".join(str(error).split())
    if launch.rank == 0:
        Path(args.results).write_text(json.dumps(results))


def measure(variant: Variant, topology: Topology, args: argparse.Namespace) -> list[Times]:
    """Return the rounds of the things that are timed.

    Raises:
        ConfigError: megalite has no such variant.
    """
    alone = replace(topology, dp=Axis("dp", 1, 0, (topology.rank,), topology.dp.group))
    both = topology
    if variant.axis == "tp":
        both = replace(alone, tp=replace(topology.dp, name="tp"))
    off, on = (new_trainer(config_of(args, flags), both) for flags in (variant.off, variant.on))
    steps = [off.step, on.step]
    if variant.axis == "dp":
        compute = new_trainer(config_of(args, ""), alone)
        num_elements = sum(weight.numel() for chunk in compute.chunks for weight in chunk.parameters())
        messages = communication(num_elements, args.bucket_size, variant.sharded, topology.dp)
        steps = [compute.step, messages, *steps]
    rounds = []
    for _ in range(args.rounds + 1):
        cpu, foreign = time.process_time(), ForeignCPU()
        *apart, off_s, on_s = (time_of(step, args.steps) for step in steps)
        waited = [time_waited(step, args.steps) for step in (off.step, on.step)]
        used = torch.tensor([time.process_time() - cpu])
        dist.all_reduce(used)
        alone_s, messages_s = apart or (math.nan, math.nan)
        rounds.append(Times(alone_s, messages_s, off_s, on_s, *waited, foreign.share(used.item())))
    return rounds[1:]  # the first warms up


def new_trainer(config: Config, topology: Topology) -> Trainer:
    """Return a model of its own, in training."""
    return start_trainer(config, topology)


def communication(num_elements: int, bucket_size: int, sharded: bool, dp: Axis) -> Callable[[], None]:
    """Run only the communication of a step, in buckets that are all started at once."""
    even = num_elements // dp.size * dp.size
    buckets = torch.zeros(even).split(bucket_size // dp.size * dp.size)
    pairs = [(bucket, torch.zeros(len(bucket) // dp.size)) for bucket in buckets]

    def all_reduce() -> None:
        for work in [dist.all_reduce(bucket, group=dp.group, async_op=True) for bucket in buckets]:
            work.wait()

    def reduce_scatter_and_all_gather() -> None:
        for work in [flat_reduce_scatter(part, bucket, dp) for bucket, part in pairs]:
            work.wait()
        for work in [flat_all_gather(bucket, part, dp) for bucket, part in pairs]:
            work.wait()

    return reduce_scatter_and_all_gather if sharded else all_reduce


def time_of(step: Callable[[], object], num_steps: int) -> float:
    """Return the seconds of a step among others, on the slower rank.

    They are counted from the end of one step to the end of a later one: what a step leaves to be done under
    the next one is in it.
    """
    dist.barrier()
    step()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    seconds = torch.tensor([(time.perf_counter() - start) / num_steps])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def time_waited(step: Callable[[], object], num_steps: int) -> float:
    """Return the seconds of a step among others in which the rank that waits longer waits."""
    waits = Waits()
    dist.barrier()
    step()
    with waits.counted():
        for _ in range(num_steps):
            step()
    seconds = torch.tensor([waits.seconds / num_steps])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def config_of(args: argparse.Namespace, flags: str) -> Config:
    """Return the model and batch of a step, one microbatch a rank.

    Raises:
        ConfigError: megalite does not know one of the flags.
    """
    words = f"""
        --num-layers {args.layers} --hidden-size {args.hidden} --num-attention-heads {args.hidden // 64}
        --seq-length {args.seq_length} --vocab-size {args.vocab_size} --hidden-dropout 0 --attention-dropout 0
        --micro-batch-size {args.micro_batch_size} --train-iters 100000 --eval-iters 0 --mock-data
        --lr 1e-4 --lr-decay-style constant --num-threads 1 --ddp-bucket-size {args.bucket_size} {flags}
    """
    config, _ = parse(words.split())
    check_config(config, NUM_RANKS)
    return config


def print_table(results: dict[str, list[list[float]] | str], args: argparse.Namespace) -> None:
    """Print one row per variant: medians over the rounds."""
    print(f"torch {torch.__version__}, {NUM_RANKS} ranks of one thread, {vars(args)}")
    titles = ("compute", "messages", "off", "on", "waited off", "on", "hidden", "saved", "others' CPU")
    print(ROW.format("ms a step", *titles))
    for name, rounds in results.items():
        if isinstance(rounds, str):
            print(f"{name:<30} skipped: {rounds}")
            continue
        times = Times(*(statistics.median(column) for column in zip(*rounds, strict=True)))
        hidden = 1 - times.waited / times.messages
        saved = (times.off - times.on) / times.messages
        cells = ["-" if math.isnan(seconds) else f"{1e3 * seconds:.0f}" for seconds in times[:6]]
        print(ROW.format(name, *cells, f"{hidden:.0%}", f"{saved:.0%}", f"{times.foreign:.0%}"))
        if times.foreign > BUSY:
            print(f"  others had over {BUSY:.0%} of the cores: measure again when it is quiet")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the link, the model and what to compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc writes it")
    parser.add_argument(
        "--variants", default=";".join(VARIANTS), help="names with semicolons; by default all"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--bucket-size", type=int, default=2_000_000, help="elements of a message")
    parser.add_argument("--steps", type=int, default=3, help="steps of one turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.variants.split(";") if name not in VARIANTS]:
        parser.error(f"--variants {';'.join(unknown)}: choose of {'; '.join(VARIANTS)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
