"""Test which layout --layout auto chooses for a machine, and that all ranks get it."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from torch.distributed import HashStore

from megalite.config import Config
from megalite.distributed.rendezvous import Launch
from megalite.frontends.command_line import parse, parse_run
from megalite.plan.auto_layout import (
    NOTE,
    LayoutChoice,
    add_note,
    choose_layout,
    read_notes,
)
from megalite.plan.layout_fields import changed_fields
from megalite.plan.layout_search import fastest, search, simplest
from megalite.plan.plan_options import read_calibration, write_calibration
from megalite.plan.plan_report import answer
from megalite.plan.plan_request import read_request
from megalite.plan.rank_plan import agreed_layout
from megalite.utils.errors import UserError
from megalite.utils.hardware.gpus import GPUS
from megalite.utils.hardware.node_hardware import NodeHardware

H100 = NodeHardware(
    "NVIDIA H100 80GB HBM3",
    84.9e9,
    132,
    has_peer_access=True,
    network_gbps=50.0,
    host_bytes=2e12,
    num_ranks=8,
)
CORES = NodeHardware("cpu", 12e9, 1, has_peer_access=True, network_gbps=None, host_bytes=24e9, num_ranks=2)
BATCH = "--mock-data --train-iters 10 --lr 1e-3 --global-batch-size"
GPT2 = f"--preset gpt2-124m {BATCH} 16"


def choose(
    flags: str, world_size: int, hardware: NodeHardware, *notes, must_fit: bool = True
) -> LayoutChoice:
    parsed = parse_run(flags.split())
    ranks = min(world_size, hardware.num_ranks)
    hardware = replace(hardware, num_ranks=ranks)
    return choose_layout(parsed.config, parsed.set_fields, world_size, hardware, notes, must_fit=must_fit)


def chosen(flags: str, world_size: int, hardware: NodeHardware) -> Config:
    return choose(flags, world_size, hardware).apply(parse(flags.split())[0])


def test_one_gpu_takes_large_microbatches() -> None:
    config = chosen(f"--preset gpt2-124m --bf16 {BATCH} 64", 1, H100)
    assert config.training.micro_batch_size == 16
    assert config.training.global_batch_size == 64
    assert config.parallel.layout == "manual"


def test_8_bits_keep_the_micro_batch_size_that_their_scales_depend_on() -> None:
    flags = f"--preset gpt2-124m --bf16 --fp8 {BATCH} 64"
    assert chosen(flags, 1, H100).training.micro_batch_size == 1
    assert chosen(f"{flags} --fp8-recipe mxfp8", 1, H100).training.micro_batch_size > 1


def test_options_that_are_set_stay() -> None:
    flags = f"--preset llama3-8b --bf16 {BATCH} 64 --micro-batch-size 4 --tp 2 --recompute-granularity full"
    config = chosen(flags, 8, H100)
    assert (config.training.micro_batch_size, config.parallel.tp) == (4, 2)
    assert config.recompute.recompute_granularity == "full"


def test_experts_are_divided_and_their_use_is_named() -> None:
    fixed = "--tp 1 --pp 1 --cp 1 --micro-batch-size 1 --recompute-granularity full --zero-stage 1"
    flags = f"--preset olmoe-1b-7b --bf16 {BATCH} 64 {fixed} --moe-imbalance 1.25"
    choice = choose(flags, 8, replace(H100, memory_bytes=50e9))
    assert choice.apply(parse(flags.split())[0]).parallel.ep > 1
    assert "it assumes --moe-imbalance 1.25: " in choice.lines[1]


def test_a_flag_with_the_default_value_counts_as_set() -> None:
    config = chosen(f"--preset gpt2-124m --bf16 {BATCH} 64 --micro-batch-size 1", 1, H100)
    assert config.training.micro_batch_size == 1


def test_less_memory_makes_the_layout_smaller() -> None:
    plenty, little = (chosen(GPT2, 2, replace(CORES, memory_bytes=size)) for size in (12e9, 3e9))
    assert (plenty.parallel.tp, plenty.parallel.pp, plenty.parallel.zero_stage) == (1, 1, 0)
    assert little.parallel.tp * little.parallel.pp == 2 or little.parallel.zero_stage > 0


def test_optimizer_state_goes_to_the_host_if_it_fits_there() -> None:
    flags = f"--preset llama3-70b --bf16 {BATCH} 64 --micro-batch-size 1"
    assert chosen(flags, 8, H100).optimizer.optimizer_cpu_offload
    with pytest.raises(UserError, match=r"of the 100\.0 GB of a node's host memory; .*use more ranks"):
        choose(flags, 8, replace(H100, host_bytes=100e9))


def test_a_cpu_offloads_nothing() -> None:
    with pytest.raises(UserError, match="no layout of 2 ranks fits"):
        choose(GPT2, 2, replace(CORES, memory_bytes=1.5e9))


def test_the_nearest_layouts_and_what_each_lacks() -> None:
    with pytest.raises(UserError) as caught:
        choose(f"{GPT2} --micro-batch-size 8", 2, replace(CORES, memory_bytes=1.5e9))
    first, *nearest = str(caught.value).splitlines()
    assert "remove --micro-batch-size 8 to let more be chosen" in first
    assert len(nearest) == 3
    lacking = [float(line.split(" lacks ")[1].split(" GB")[0]) for line in nearest]
    assert lacking == sorted(lacking)
    assert lacking[0] > 0
    assert len({line.split("dp")[0] for line in nearest}) == 3  # of different tp and pp
    assert all(" GB are " in line for line in nearest)


def test_a_run_without_the_flag_keeps_its_defaults_if_nothing_fits() -> None:
    choice = choose(GPT2, 2, replace(CORES, memory_bytes=1.5e9), must_fit=False)
    assert "no layout is planned to fit" in choice.lines[1]
    config = parse(GPT2.split())[0]
    assert choice.apply(config) == replace(config, parallel=replace(config.parallel, layout="manual"))


def test_the_flags_that_keep_the_layout_choose_it_again() -> None:
    flags = f"--preset llama3-8b --bf16 {BATCH} 64"
    choice = choose(flags, 8, H100)
    pinned = choice.lines[2].split(" pass ")[1]
    config, _ = parse([*flags.split(), *pinned.split()])
    assert choice.apply(parse(flags.split())[0]) == replace(
        config, parallel=replace(config.parallel, layout="manual")
    )


def test_the_simplest_of_the_almost_fastest_layouts() -> None:
    plans = search(read_request(f"--gpu a100-80 --world-size 4 {GPT2} --bf16 --search".split())).fitting
    (best,) = fastest(plans, 1)
    similar = [plan for plan in plans if plan.time.seconds <= 1.1 * best.time.seconds and not plan.is_tight]
    fewest = min(len(changed_fields(plan.run.config)) for plan in similar)
    assert len(similar) > 3
    assert fewest < max(len(changed_fields(plan.run.config)) for plan in similar)
    for found in (simplest(plans, 1.1), simplest(plans[::-1], 1.1)):
        assert found in similar
        assert len(changed_fields(found.run.config)) == fewest


def test_a_layout_that_ran_out_of_memory_makes_the_next_one_smaller() -> None:
    flags = f"--preset gpt2-124m --bf16 {BATCH} 64"
    first = choose(flags, 1, H100)
    second = choose(flags, 1, H100, first.note)
    third = choose(flags, 1, H100, first.note, second.note)
    sizes = [each.values["micro_batch_size"] for each in (first, second, third)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3
    assert third.note.planned_bytes < second.note.planned_bytes < first.note.planned_bytes
    elsewhere = replace(first.note, device="NVIDIA A100-SXM4-80GB")
    assert choose(flags, 1, H100, elsewhere) == first
    assert "since a layout that needs more ran out of memory" in second.lines[1]
    assert "ran out of memory" not in first.lines[1]


def test_measured_rates_replace_the_table(tmp_path: Path) -> None:
    file = str(tmp_path / "rates.json")
    flags = f"--preset gpt2-124m --bf16 {BATCH} 64 --calibration {file}"
    with pytest.raises(UserError, match=r"cannot be read .*--calibrate --calibration"):
        choose(flags, 1, H100)
    write_calibration(file, replace(GPUS["h100-80"], tflops=98.94))
    assert read_calibration(file).tflops == 98.94
    slow, fast = choose(flags, 1, H100), choose(flags.partition(" --calibration")[0], 1, H100)
    assert f"with the rates of {file}" in slow.lines[0]
    seconds = [float(each.lines[1].split("planned ")[1].split()[0]) for each in (slow, fast)]
    assert seconds[0] > 3 * seconds[1]
    text = "\n".join(answer(f"--preset gpt2-124m --calibration {file} --global-batch-size 8".split()))
    assert "iteration " in text
    with pytest.raises(UserError, match="plan for different GPUs"):
        list(answer(f"--preset gpt2-124m --calibration {file} --gpu h100".split()))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tflops": 0}, "tflops is 0"),
        ({"num_sms": 1.5}, "num_sms is 1.5"),
        ({"memory_gib": "80"}, "memory_gib is '80'"),
        ({"more": 1}, "does not have the figures"),
    ],
)
def test_damaged_rates(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(asdict(GPUS["h100-80"]) | change))
    with pytest.raises(UserError, match=f"is damaged .*{reason}"):
        read_calibration(str(file))


def test_notes_are_kept_in_the_folder(tmp_path: Path) -> None:
    note = choose(GPT2, 2, CORES).note
    assert read_notes(None) == read_notes(str(tmp_path)) == []
    assert add_note(None, note) is None
    add_note(str(tmp_path), note)
    assert add_note(str(tmp_path), note) == f"{tmp_path}/{NOTE}"
    assert read_notes(str(tmp_path)) == [note, note]
    (tmp_path / NOTE).write_text('{"ran_out_of_memory": [{}]}')
    with pytest.raises(UserError, match="is damaged"):
        read_notes(str(tmp_path))


def _answers(world_size: int, hardware: list[NodeHardware]) -> list[LayoutChoice | str]:
    """Return what each rank gets; ranks are threads that share a store."""
    store, found = HashStore(), dict[int, LayoutChoice | str]()

    def rank_main(rank: int) -> None:
        def choose_for(weakest: NodeHardware) -> LayoutChoice:
            assert rank == 0
            return choose(GPT2, world_size, weakest)

        launch = Launch(rank, world_size, rank, world_size)
        try:
            found[rank] = agreed_layout(launch, store, hardware[rank], choose_for)
        except UserError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    return [found[rank] for rank in range(world_size)]


def test_all_ranks_get_the_layout_for_the_weakest_node() -> None:
    small = replace(CORES, memory_bytes=3e9)
    answers = _answers(2, [CORES, small])
    assert answers == [choose(GPT2, 2, small)] * 2


def test_all_ranks_get_the_error() -> None:
    answers = _answers(2, [replace(CORES, memory_bytes=1e9)] * 2)
    assert answers[0] == answers[1]
    assert "no layout of 2 ranks fits" in str(answers[0])
    assert "some ranks find a GPU and others none" in str(_answers(2, [CORES, H100])[1])
