"""The layout table: the same run on any tp x pp x dp x cp and micro-batch size, for each kind of model.

fp64 is the proof: only the order of sums differs, and that stays far below the bounds. fp32 is the everyday
check.
The reference of every row is one rank that takes each global batch of 8 samples in one pass.

CORE always runs. Each layout of ``verify_layout --layouts all``, so every technique and every schedule, has
one of the models there, and each model has tensor, pipeline, data and sequence parallelism. The other rows
are marked slow; `tests/conftest.py` adds a sample of them to a run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megalite.config.parallel import CpCommType
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.layouts import TABLE, Layout
from megalite.observe.verify.record_run import RunRecord
from megalite.observe.verify.record_run import record_run as record_anew
from megalite.utils.errors import ConfigError
from tests.live_ranks import record_run
from tests.parity.models import (
    BESIDE,
    DEEPSEEK,
    DROPPING,
    FALCON,
    GEMMA4,
    GEMMA4_E2B,
    GLOBAL_BATCH_SIZE,
    GPT_OSS,
    HYBRID,
    KIMI,
    LATENT,
    LFM2,
    MIXTRAL,
    MODELS,
    MUON,
    NEMOTRON,
    NUM_ITERATIONS,
    OF_ONE_STAGE,
    OLMO_HYBRID,
    OWN_EMBEDDINGS,
    SWITCHES,
    THREE_HEADS,
    WIDE_EXPERTS,
    WINDOWED,
    config_of,
    reference,
    run_alone,
    run_in,
)

LAYOUTS = ("tp2", "pp2", "dp2", "tp2pp2", "tp2dp2", "pp2dp2", "tp4", "pp4", "dp4", "tp2pp2dp2")
OTHER_MICRO_BATCHES = [
    f"{layout}mbs{mbs}" for mbs in (1, 4) for layout in ("", *LAYOUTS) if (mbs, layout) != (4, "dp4")
]  # dp4 x 4 samples is more than the global batch
ROWS = (
    [
        (model, dtype, name)
        for model in MODELS
        for dtype in ("fp64", "fp32")
        for name in (*LAYOUTS, *OTHER_MICRO_BATCHES)
    ]
    + [
        (model, "fp64", "pp2" if (model, name) == (GEMMA4, "pp4") else name)
        for model in SWITCHES
        for name in ("tp2", "tp2+sp", "tp4", "pp4", "dp4", "dp2+zero3", "tp2pp2dp2+sp+zero1")
    ]
    + [
        (model, dtype, name)
        for model in (*MODELS, *SWITCHES)
        for dtype, name in (("fp64", "cp2"), ("fp64", "cp4+a2a"), ("fp64", "tp2cp2+sp"), ("fp32", "dp2cp2"))
        # The gradient of the last layer's scale is 0, because a norm follows it, and in fp32 only rounding.
        if dtype == "fp64" or not SWITCHES.get(model, {}).get("layer_output_scale")
    ]
    + [
        ("gpt-tiny", "fp64", name)
        for name in (
            *("cp4", "cp8", "tp2cp2", "pp2cp2", "dp2cp2", "cp2+zero2", "dp2cp2+zero3", "tp2cp2+sp+a2a+full"),
            *(
                "dp2cp2shard2+zero2",
                "pp2v2cp2",
                "pp2zbvcp2+zero3",
                "pp2cp2+full+offload",
                "tp2pp2cp2+sp+zero1",
            ),
        )
    ]
)
ROWS += [
    *(
        (model, "fp64", "cp2+p2p")
        for model in (*MODELS, *SWITCHES)
        if model != "llama-tiny, qk-clip"  # a ring has no largest scores
    ),
    *(
        ("gpt-tiny", "fp64", name)
        for name in (
            *("cp4+p2p", "cp8+p2p", "tp2cp2+p2p", "tp2cp2+sp+p2p", "pp2cp2+full+p2p", "dp2cp2+zero3+p2p"),
            *("pp2v2cp2+zero2+p2p", "pp2zbvcp2+zero1+p2p", "dp2cp2shard2+zero2+offload+p2p"),
        )
    ),
    *(
        (model, "fp64", name)
        for model in ("bloom-tiny", WINDOWED, "llama-tiny, gpt-oss", LATENT)
        for name in ("cp4+p2p", "tp2cp2+sp+selective+p2p")
    ),
]
ROWS += [
    *(
        (model, "fp64", "cp4+a2a+p2p")
        for model in (*MODELS, *SWITCHES)
        if model not in ("llama-tiny, qk-clip", GPT_OSS)
    ),
    *(
        ("gpt-tiny", "fp64", name)
        for name in (
            *("tp2cp4+a2a+p2p", "pp2cp4+full+a2a+p2p", "dp2cp4+zero3+a2a+p2p", "cp8+a2a+p2p"),
            *("pp2zbvcp4+zero1+a2a+p2p", "dp2cp4shard2+zero2+offload+a2a+p2p"),
        )
    ),
    *((model, "fp64", "tp2cp4+sp+selective+a2a+p2p") for model in (GPT_OSS, LATENT)),
    *((model, "fp64", "pp2dpvcp4mbs1+a2a+p2p") for model in ("gpt-tiny", GPT_OSS, DEEPSEEK)),
    *(
        (model, "fp64", name)
        for model in (MIXTRAL, GPT_OSS, DEEPSEEK)
        for name in ("cp4ep4mbs1+a2a+p2p", "tp2cp4ep8etp1+sp+a2a+p2p", "pp2dpvcp4ep2mbs1+zero2+a2a+p2p")
    ),
]
ROWS += [
    (model, "fp64", name)
    for model in (MIXTRAL, WIDE_EXPERTS, GPT_OSS, DEEPSEEK, BESIDE)
    for name in (
        *("dp2ep2", "dp4ep2", "dp4ep4+zero3", "tp4ep4etp1+sp", "tp2dp2ep2etp1+sp", "tp2dp2ep4etp1+sp+zero1"),
        *("tp2dp2ep2+sp+full", "tp2dp2etp1+sp", "dp4shard2ep2+zero2", "pp2zbdp2ep2", "pp2v2dp2ep2+zero1"),
        *("pp2zbvdp2ep2+zero3", "cp2dp2ep4", "cp2ep2+a2a", "dp4ep2+zero2+offload", "dp2ep2mbs1"),
        *("pp2dpvdp2ep2", "pp2dpvdp2ep2+zero3+full", "tp2pp2dpvdp2ep4etp1+sp+zero2"),
    )
]
ROWS += [
    (model, "fp64", f"{name}+allgather")
    for model, names in {
        MIXTRAL: ("dp4ep4+zero3", "tp2dp2ep2etp1+sp"),
        WIDE_EXPERTS: ("tp2dp2ep4etp1+sp+zero1", "pp2zbvdp2ep2+zero3", "dp4ep2+zero2+offload"),
        GPT_OSS: ("tp2dp2ep2+sp+full", "cp2ep2+a2a"),
        DEEPSEEK: ("pp2dpvdp2ep2+zero3+full", "tp2pp2dpvdp2ep4etp1+sp+zero2"),
        BESIDE: ("cp2dp2ep4", "pp2v2dp2ep2+zero1"),
        DROPPING: ("tp4ep4etp1+sp", "cp2dp2ep4"),
    }.items()
    for name in names
]
ROWS += [
    (DROPPING, "fp64", name)
    for name in ("tp2dp2ep2+sp+full", "cp2dp2ep4", "pp2zbvdp2ep2+zero3", "tp4ep4etp1+sp", "dp2ep2mbs1")
]
ROWS += [
    (GEMMA4_E2B, "fp64", name)
    for name in (
        *("tp2", "tp2+sp", "tp4", "dp4", "dp2+zero3", "tp2dp2+sp+full+zero1", "tp1+selective", "dp2+offload"),
        *("cp2", "cp4+a2a", "tp2cp2+sp", "cp2+p2p"),
    )
]
ROWS += [
    (OWN_EMBEDDINGS, "fp64", name)
    for name in (
        *("pp2", "pp2v2", "pp2zbdp2", "pp2zbvdp2+zero3", "pp2dpvdp2", "pp2+full+offload", "pp2cp2+full+p2p"),
        *("tp2pp2cp2+sp+zero1", "pp2v2cp2+zero2+p2p"),
    )
]
ROWS += [(model, "fp64", "tp3") for model in THREE_HEADS]
ROWS += [("gpt-tiny", "fp64", name) for name in TABLE]
MUON_LAYOUTS = (
    *("tp2pp2dp2+zero1", "tp2+sp", "dp2+zero2", "dp2+zero3", "dp4shard2+zero1"),
    *("tp2", "pp2", "dp2+zero1"),  # which the first one combines
)
ROWS += [(MUON, "fp64", name) for name in MUON_LAYOUTS]
ROWS += [(GEMMA4, "fp64", "tp1+full")]
ROWS += [(model, "fp64", "tp2pp2dp2") for model in SWITCHES]
ROWS += [
    (model, "fp64", name)
    for model in (HYBRID, KIMI)
    for name in ("dp4ep2", "tp2dp2ep4etp1+sp+zero1", "pp2v2dp2ep2+zero1")
]
ROWS += [
    (model, "fp64", name)
    for model in (HYBRID, OLMO_HYBRID, KIMI, LFM2, FALCON, NEMOTRON)
    for name in ("cp4+p2p", "tp2cp2+sp+selective+p2p", "tp2pp2cp2+sp+zero1", "pp2dp2cp2+full+zero3+p2p")
]
TECHNIQUES = ("tp", "pp", "dp", "sp")
"""What each model has in a row that always runs, in one or several."""


def _techniques_of(name: str) -> set[str]:
    layout = Layout.parse(name)
    return {*layout.sizes, *layout.switches}.intersection(TECHNIQUES)


def _can_run(model: str, name: str) -> bool:
    try:
        Layout.parse(name).apply(config_of(model, "fp64", "unused"), GLOBAL_BATCH_SIZE)
    except ConfigError:
        return False
    return True


def _dealt(models: Sequence[str], layouts: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return rows that have each layout once, and each model with all techniques.

    A layout goes to the model that lacks most of its techniques; of several, to the one in the fewest rows.
    """
    of_layout = {name: _techniques_of(name) for name in layouts}
    lacks = {model: set(TECHNIQUES) for model in models}
    for model in OF_ONE_STAGE:
        lacks[model].remove("pp")
    rows: list[tuple[str, str, str]] = []
    num_rows = Counter[str]()

    def take(names: Sequence[str]) -> None:
        def value(row: tuple[str, str]) -> tuple[int, int]:
            return len(lacks[row[0]] & of_layout[row[1]]), -num_rows[row[0]]

        best = sorted(itertools.product(models, names), key=value, reverse=True)
        model, name = next(row for row in best if _can_run(*row))
        rows.append((model, "fp64", name))
        lacks[model] -= of_layout[name]
        num_rows[model] += 1

    for name in sorted(layouts, key=lambda name: -len(of_layout[name])):
        take([name])
    by_size = sorted(layouts, key=lambda name: Layout.parse(name).world_size)
    while any(lacks.values()):
        take(by_size)
    return rows


CORE = [
    *_dealt([*MODELS, *SWITCHES, GEMMA4_E2B], TABLE),
    ("gpt-tiny", "fp32", "tp2pp2dp2"),
    (WIDE_EXPERTS, "fp64", "tp2dp2ep4etp1+sp+zero1"),
    (GPT_OSS, "fp64", "tp2dp2ep2+sp+full"),
    (GPT_OSS, "fp64", "cp4+a2a+p2p"),  # windows, sinks and dropout of grouped heads
    *((MUON, "fp64", name) for name in MUON_LAYOUTS[:5]),
    (GEMMA4, "fp64", "tp1+selective"),
    *((model, "fp64", "pp4") for model in ("bloom-tiny", WINDOWED)),  # on stages that read no tokens
]
CORE = list(dict.fromkeys(CORE))


def test_the_rows_that_always_run_have_each_layout_and_each_model_with_each_technique() -> None:
    assert {name for _, _, name in CORE} >= set(TABLE)
    for model in (*MODELS, *SWITCHES):
        found = set[str]().union(*(_techniques_of(name) for each, _, name in CORE if each == model))
        assert found == {*TECHNIQUES}, model
    assert len(CORE) < 95  # 54 layouts and 31 models, and not their product


@pytest.mark.parametrize(
    ("model", "dtype", "name"),
    [*CORE, *(pytest.param(*row, marks=pytest.mark.slow) for row in ROWS if row not in CORE)],
)
def test_same_run(model: str, dtype: str, name: str, corpus: str) -> None:
    run = run_in(name, config_of(model, dtype, corpus), NUM_ITERATIONS)
    assert not compare(run, reference(model, dtype, corpus)).excesses(TOLERANCES[dtype])
    assert run.losses[-1] < run.losses[0]  # it trains: a run that stands still is the same everywhere


_PUT_IN_ORDER = ("a2a", "p2p", "a2a", "p2p")
COMM_TYPES: dict[str, tuple[CpCommType, ...]] = {
    "gpt-tiny": ("p2p", "a2a", "all_gather", "p2p"),
    "bloom-tiny": ("a2a", "p2p", "all_gather", "a2a"),
    WINDOWED: ("p2p", "p2p", "a2a", "p2p"),
    GPT_OSS: ("p2p", "a2a", "p2p", "a2a"),
    GEMMA4: ("p2p", "p2p", "a2a", "p2p", "all_gather", "a2a", "p2p", "a2a"),
    HYBRID: _PUT_IN_ORDER,
    NEMOTRON: _PUT_IN_ORDER,
    LATENT: ("all_gather", "a2a", "p2p", "a2a"),
    "llama-tiny, mtp": ("p2p", "all_gather", "p2p", "a2a"),
    "llama-tiny, qk-clip": ("all_gather", "a2a", "a2a", "all_gather"),
}
"""Communication types, by layer. Layers with a window pass keys around a ring. In `GEMMA4`,
layers attend with one type to keys of layers with another. In hybrids, one layer has attention, and recurrent
layers exchange heads anyway."""
ROWS_OF_COMM_TYPES = [
    *((model, name) for model in COMM_TYPES for name in ("cp2", "cp4", "tp2cp2+sp+selective")),
    *(("gpt-tiny", name) for name in ("pp2cp2+full", "tp2cp2", "pp2v2cp2+zero2", "pp2zbvcp2+zero3")),
    *((GPT_OSS, name) for name in ("cp2dp2ep4", "pp2dpvcp2ep2mbs1")),
    (HYBRID, "tp2pp2cp2+sp+zero1"),
]
CORE_OF_COMM_TYPES = [
    *((model, "cp2") for model in ("gpt-tiny", GPT_OSS, HYBRID)),
    ("gpt-tiny", "pp2cp2+full"),
]


def _run_with(model: str, comm_types: tuple[CpCommType, ...], name: str, corpus: str) -> RunRecord:
    config = config_of(model, "fp64", corpus)
    config = replace(config, parallel=replace(config.parallel, cp_comm_type=comm_types))
    return run_in(name, config, NUM_ITERATIONS)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        *CORE_OF_COMM_TYPES,
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in ROWS_OF_COMM_TYPES
            if row not in CORE_OF_COMM_TYPES
        ),
    ],
)
def test_same_run_with_a_comm_type_for_each_layer(model: str, name: str, corpus: str) -> None:
    run = _run_with(model, COMM_TYPES[model], name, corpus)
    assert not compare(run, reference(model, "fp64", corpus)).excesses(TOLERANCES["fp64"])
    assert run.losses[-1] < run.losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "third"), [("cp4", "a2a"), ("pp2cp4", "a2a"), ("tp2cp4+sp+full", "all_gather")]
)
def test_same_run_with_rings_of_all_ranks_and_of_groups(name: str, third: CpCommType, corpus: str) -> None:
    run = _run_with("gpt-tiny", ("a2a+p2p", "p2p", third, "a2a+p2p"), name, corpus)
    assert not compare(run, reference("gpt-tiny", "fp64", corpus)).excesses(TOLERANCES["fp64"])


@pytest.mark.parametrize("name", ["tp1", "dp4", "tp2pp2dp2"])
def test_same_command_twice_is_bitwise_the_same(name: str, corpus: str) -> None:
    layout = Layout.parse(name)
    config = layout.apply(config_of("gpt-tiny", "fp32", corpus), GLOBAL_BATCH_SIZE)
    # Also on ranks that are alive since earlier tests, and on new ones.
    first, second = (
        record(config, NUM_ITERATIONS, layout.world_size) for record in (record_run, record_anew)
    )
    assert first.losses == second.losses
    assert all(first.weights[key].equal(second.weights[key]) for key in first.weights)


def test_another_seed_is_another_run(corpus: str) -> None:
    """What the table compares does depend on weights, masks and data: it could tell a difference."""
    config = config_of("gpt-tiny", "fp64", corpus)
    other = replace(config, training=replace(config.training, seed=1235))
    comparison = compare(run_alone(other, NUM_ITERATIONS), reference("gpt-tiny", "fp64", corpus))
    assert comparison.excesses(TOLERANCES["fp64"])
