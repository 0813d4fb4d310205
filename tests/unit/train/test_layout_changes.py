"""Mistakes in --layout-at are found before training, one line each."""

from __future__ import annotations

import shlex

import pytest
from torch import Tensor, nn

from megalite import ColumnParallelLinear, LayerContext, Microbatch, SequentialStage, Topology
from megalite.frontends.command_line import parse
from megalite.observe.verify.layouts import Layout
from megalite.plan.rank_plan import MemoryExhausted
from megalite.train.layout_changes import check_own_models, layouts_at, naming
from megalite.train.run_context import Providers, resolve_run
from megalite.utils.errors import ConfigError, UserError
from tests.command_line import mistakes_of

FLAGS = (
    "--preset gpt-tiny --mock-data --vocab-size 64 --global-batch-size 8 --train-iters 10 --tp 2 --pp 2 "
    "--distributed-backend gloo "
)


@pytest.mark.parametrize(
    ("entries", "mistakes"),
    [
        ("5:banana", ["5:banana: layout 'banana' must consist of tp, "]),
        ("5:tp2", ["5:tp2: tp2 has 2 ranks, and the run 4: write tp2dp2"]),
        ("5:tp3", ["5:tp3: tp3 has 3 ranks, and the run 4: write sizes whose product is 4"]),
        ("5:tp2dp4+sp", ["5:tp2dp4+sp: tp2dp4+sp has 8 ranks, and the run 4: write tp2dp2+sp"]),
        ("5:dp4mbs4", ["5:dp4mbs4: --global-batch-size 8 is not divisible by --micro-batch-size 4"]),
        ("5:dp4 5:tp4 4:pp4", ["5:tp4 is not after 5", "4:pp4 is not after 5"]),
        ("9:dp4 10:tp4 70:dp4", ["10:tp4: the run ends after iteration 10", "70:dp4: the run ends after"]),
        (
            "5:dp2tp2 6:dp2shard2tp2 7:dp4 --num-distributed-optimizer-instances 1 --zero-stage 1",
            [
                "5:dp2tp2: tp2dp2 does not keep the groups of --num-distributed-optimizer-instances: write",
                "7:dp4: dp4 does not keep",
            ],
        ),
        ("5:dp4 6:zb 7:tp2", ["6:zb: layout 'zb' has the schedule zb and no pipeline", "7:tp2: tp2 has 2"]),
    ],
)
def test_mistakes_of_layouts(entries: str, mistakes: list[str]) -> None:
    config = parse(shlex.split(f"{FLAGS} --layout-at {entries}"))[0]
    with pytest.raises(ConfigError) as caught:
        layouts_at(config, 4)
    assert len(caught.value.problems) == len(mistakes)
    for problem, expected in zip(caught.value.problems, mistakes, strict=True):
        assert problem.startswith(f"--layout-at {expected}")


@pytest.mark.parametrize(
    ("flags", "mistake"),
    [
        ("--layout-at tp4", "--layout-at tp4 cannot be read: write an iteration and the name of a layout"),
        ("--layout-at 0:tp4", "--layout-at 0:tp4 cannot be read"),
        ("--layout-at 5:tp4 --dry-run --world-size 4", "--layout-at 5:tp4 with --dry-run"),
        (
            "--layout-at 5:tp4 --sequence-parallel --tp-comm-overlap "
            "--tp-comm-overlap-method symmetric_memory",
            "--layout-at 5:tp4 with --tp-comm-overlap-method symmetric_memory",
        ),
        ("--layout-file f --dry-run --world-size 4", "--layout-file f with --dry-run"),
        ("--layout-at 5:tp4 --verify-layouts tp4", "--layout-at 5:tp4 with --verify-layouts"),
    ],
)
def test_mistakes_of_flags(flags: str, mistake: str) -> None:
    assert [each for each in mistakes_of(f"{FLAGS} {flags}") if each.startswith(mistake)]


def test_the_layout_of_each_iteration() -> None:
    config = parse(shlex.split(f"{FLAGS} --layout-at 3:dp4+zero3 9:tp2cp2mbs2"))[0]
    assert layouts_at(config, 4) == {3: Layout.parse("dp4+zero3"), 9: Layout.parse("tp2cp2mbs2")}
    assert layouts_at(parse(shlex.split(FLAGS))[0], 4) == {}


def test_an_error_of_memory_does_not_blame_the_first_layout() -> None:
    with pytest.raises(UserError) as caught, naming("--layout-at 5:tp4: "):
        raise MemoryExhausted("too large")
    assert str(caught.value) == "--layout-at 5:tp4: too large"
    assert caught.value.on_one_rank
    assert not isinstance(caught.value, MemoryExhausted)


class Narrow(nn.Module):
    """Layer whose width of 3 cannot be cut over two ranks."""

    def __init__(self, hidden_size: int, context: LayerContext) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(hidden_size, 3, context)

    def forward(self, x: Tensor, microbatch: Microbatch) -> Tensor:
        return x + self.up(x).sum()


class Odd(SequentialStage):
    def build_layer(self, number: int) -> nn.Module:
        return Narrow(self.config.hidden_size, self.context)


def test_an_own_model_that_cannot_be_cut(topology: Topology) -> None:
    config = parse(shlex.split(FLAGS.replace("--tp 2 --pp 2", "--tp 1 --pp 1")))[0]
    run = resolve_run(config, topology, providers=Providers(model=Odd))
    layouts = {number: Layout.parse(name) for number, name in ((3, "mbs4"), (5, "tp2"))}
    check_own_models(run, {3: layouts[3]})
    with pytest.raises(UserError, match=r"^--layout-at 5:tp2: a parameter of shape \(3, 64\) cannot be"):
        check_own_models(run, layouts)
