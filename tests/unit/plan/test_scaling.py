"""Scaling tables: planned efficiencies, measured runs beside them, and what the command line refuses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megalite.frontends.command_line import parse
from megalite.plan import measure as measuring
from megalite.plan.measure import autotune, measure_scaling
from megalite.plan.plan_report import answer
from megalite.plan.trial import FAILED, Length, Trial
from megalite.plan.write_job import write_job
from megalite.utils.errors import UserError

MODEL = "--preset llama2-7b --gpu a100-80 --tp 2 --zero-stage 1 --bf16 --recompute-granularity full"
RUN = f"{MODEL} --global-batch-size 256 --scaling 1,2,8"


def planned(text: str) -> dict[tuple[str, str, int], dict]:
    (line,) = answer(["--json", *text.split()])
    found = json.loads(line)["scaling"]
    return {(each["scaling"], each["series"], each["nodes"]): each for each in found}


def test_efficiencies_are_relative_to_the_fewest_nodes() -> None:
    found = planned(RUN)
    assert len(found) == 12
    for (mode, series, nodes), point in found.items():
        first = found[mode, series, 1]
        rates = [each["tokens_per_second"] / each["world_size"] for each in (point, first)]
        assert point["efficiency"] == pytest.approx(rates[0] / rates[1])
        assert point["world_size"] == 8 * nodes
        assert 0 < point["efficiency"] <= 1.0
    strong = [found["strong", "infiniband", nodes] for nodes in (1, 8)]
    times = [point["iteration_time_s"] for point in strong]
    assert strong[1]["efficiency"] == pytest.approx(times[0] / times[1] / 8)


def test_weak_scaling_grows_the_batch_to_the_one_of_strong_scaling() -> None:
    found = planned(RUN)
    batches = {key: point["global_batch_size"] for key, point in found.items()}
    assert [batches["weak", "ethernet", nodes] for nodes in (1, 2, 8)] == [32, 64, 256]
    assert [batches["strong", "ethernet", nodes] for nodes in (1, 2, 8)] == [256] * 3
    assert (
        found["weak", "ethernet", 8]["iteration_time_s"] == found["strong", "ethernet", 8]["iteration_time_s"]
    )


def test_the_network_matters_only_between_nodes() -> None:
    found = planned(f"{RUN} --ethernet-gbps 2")
    faster, usual = planned(f"{RUN} --ethernet-gbps 8"), planned(f"{RUN} --network-gbps 2")
    for mode in ("weak", "strong"):
        times = [found[mode, series, 1]["iteration_time_s"] for series in ("infiniband", "ethernet")]
        assert times[0] == times[1]
        shares = [each[mode, "ethernet", 8]["efficiency"] for each in (found, faster)]
        assert shares[0] < shares[1] < found[mode, "infiniband", 8]["efficiency"]
        assert usual[mode, "infiniband", 8]["efficiency"] == pytest.approx(shares[0])


def test_the_table_fits_a_terminal_and_the_picture_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "scaling.svg"
    text = list(answer(f"{RUN} --svg {file}".split()))
    rows = [line.split() for line in text if line.strip()[:2] in ("1 ", "2 ", "8 ")]
    assert [row[:2] for row in rows] == [["1", "8"], ["2", "16"], ["8", "64"]]
    assert rows[0][3::2] == ["100.0%"] * 4
    assert max(map(len, text)) <= 80
    assert "GB/s per GPU to other nodes: InfiniBand 25, Ethernet 1.562" in text
    picture = ElementTree.parse(file).getroot()
    lines = [
        each for each in picture.iter() if each.tag.endswith("polyline") and each.get("stroke-width") == "2"
    ]
    assert [len(line.attrib["points"].split()) for line in lines] == [3] * 4


def test_layouts_that_do_not_fit_are_marked() -> None:
    text = list(answer(f"{RUN} --gpu v100-16 --tp 1".split()))
    assert "! does not fit in memory" in text
    assert not planned(f"{RUN} --gpu v100-16 --tp 1")["weak", "ethernet", 1]["fits"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            f"{MODEL} --global-batch-size 8 --scaling 1",
            "--scaling: '1' is not a list of two or more numbers of n",
        ),
        (f"{MODEL} --global-batch-size 8 --scaling 1,x", "--scaling: '1,x' is not a list"),
        (f"{MODEL} --global-batch-size 8 --scaling 0,2", "--scaling: '0,2' is not a list"),
        (f"{MODEL} --scaling 2,1", "--scaling 1,2 needs --global-batch-size, the batch on 2 nodes"),
        (
            f"{RUN} --world-size 8",
            "--scaling 1,2,8 and --world-size 8 both set the number of GPUs: remove --world-",
        ),
        (f"{RUN} --dp 4", "--scaling 1,2,8 and --dp 4 both set the number of GPUs: remove --dp"),
        (f"{RUN} --search", "--scaling 1,2,8 plans one layout, and --search many: pass --tp, --pp"),
        (f"{RUN} --tp 16", "--scaling 1, which is 8 ranks: world size 8 is not a multiple of --tp 16"),
        (
            f"{RUN} --global-batch-size 300",
            "--global-batch-size 300 has no equal part for each of 8 nodes: pass ",
        ),
        (f"{RUN} --svg /nowhere/a.svg", "--svg /nowhere/a.svg cannot be written"),
    ],
)
def test_mistakes_are_one_line(words: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        list(answer(words.split()))
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (f"{MODEL} --svg a.svg", "--svg has no effect without --scaling"),
        (f"{MODEL} --ethernet-gbps 3", "--ethernet-gbps has no effect without --scaling"),
        (f"{RUN} --node-mtbf 3y", "--node-mtbf has no effect with --scaling"),
        (f"{RUN} --train-tokens 1e9", "--train-tokens has no effect with --scaling"),
    ],
)
def test_options_without_effect_are_named(words: str, note: str) -> None:
    assert f"note: {note}" in list(answer(words.split()))


def test_other_commands_refuse_it(tmp_path: Path) -> None:
    message = "--scaling is an option of megalite plan and megalite scaling: remove it"
    with pytest.raises(UserError, match=message):
        write_job(f"--nodes 2 --time 1:00:00 {RUN}".split(), "")
    with pytest.raises(UserError, match=message):
        list(autotune([*RUN.split(), "--folder", str(tmp_path)], ""))


TINY = (
    "--preset gpt-tiny --vocab-size 256 --mock-data --gpu h100 --gpus-per-node 1 --global-batch-size 8 "
    "--scaling 1,2 --iterations 4 --warmup-iterations 1"
)


class _Runs:
    """Stands for trials on this machine: an iteration takes a second for each sample of a rank, and more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.configs: list = []
        self.reason = ""
        monkeypatch.setattr(measuring, "run_trial", self._run)

    def _run(self, config, world_size: int, folder: Path, length: Length, program) -> Trial:
        self.configs.append(config)
        if world_size == 2 and self.reason:
            return Trial(FAILED, self.reason)
        folder.mkdir(parents=True, exist_ok=True)
        write_metrics(folder, config, world_size, length)
        return measuring.read_measured(folder / "metrics.jsonl", length)


def write_metrics(folder: Path, config, world_size: int, length: Length) -> None:
    """Write what a run writes: its config, and a line for each iteration."""
    trial = measuring.trial_config(config, folder / "metrics.jsonl", length)
    (folder / "config.yaml").write_text(measuring.to_yaml(trial))
    batch = config.training.global_batch_size
    seconds = batch / world_size * (1 if world_size == 1 else 1.25)
    row = {
        "iteration_time_ms": 1e3 * seconds,
        "tokens_per_second": batch * config.model.seq_length / seconds,
        "memory_reserved_mb": 1000,
    }
    lines = [json.dumps({"iteration": number, **row}) for number in range(1, length.iterations + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> _Runs:
    return _Runs(monkeypatch)


def test_runs_are_measured_beside_their_plan(trials: _Runs, tmp_path: Path) -> None:
    words = [*TINY.split(), "--folder", str(tmp_path / "scaling")]
    text = list(measure_scaling(words, ""))
    assert text[0] == "1 node, 1 rank, batch 4: 4 iterations"
    assert len(trials.configs) == 3  # the largest run is both weak and strong
    assert {config.parallel.num_threads for config in trials.configs} == {
        1
    }  # as many for one rank as for two
    rows = [line.split() for line in text if line.startswith("     ") and "%" in line]
    assert [row[5] for row in rows] == ["100.0%", "80.0%"]  # weak, measured
    assert [row[9] for row in rows] == ["100.0%", "80.0%"]  # strong, measured
    assert [float(row[8]) for row in rows] == [8.0, 5.0]

    picture = tmp_path / "scaling.svg"
    (line,) = measure_scaling([*words, "--svg", str(picture), "--json"], "")
    assert "measured" in picture.read_text()
    assert len(trials.configs) == 3  # nothing runs again
    found = {(each["scaling"], each["series"], each["nodes"]): each for each in json.loads(line)["scaling"]}
    assert found["strong", "measured", 2]["efficiency"] == pytest.approx(0.8)
    assert found["strong", "planned", 2]["efficiency"] == pytest.approx(
        planned(f"{TINY.partition(' --iterations')[0]}")["strong", "infiniband", 2]["efficiency"]
    )
    list(measure_scaling([*words, "--lr", "0.5"], ""))
    assert len(trials.configs) == 6  # with another config


def test_a_run_that_fails_has_a_reason(trials: _Runs, tmp_path: Path) -> None:
    trials.reason = "MemoryError: 3 GiB"
    text = list(measure_scaling([*TINY.split(), "--folder", str(tmp_path / "scaling")], ""))
    assert "2 nodes, batch 8: MemoryError: 3 GiB" in text
    (row,) = [line.split() for line in text if line.split()[:1] == ["2"] and "%" in line]
    assert row[4] == row[-1] == "-"


def test_slurm_runs_the_jobs_and_the_command_reads_them(tmp_path: Path) -> None:
    words = [*TINY.split(), "--folder", str(tmp_path), "--time", "00:30:00", "--partition", "gpu"]
    commands = list(measure_scaling(words, ""))[-3:]
    scripts = [Path(command.removeprefix("sbatch ")) for command in commands]
    assert [script.parent.name for script in scripts] == [
        "nodes_1_batch_4",
        "nodes_2_batch_8",
        "nodes_1_batch_8",
    ]
    length = Length(4, 1, 900.0)
    for script in scripts:
        text = script.read_text()
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        file, nodes = script.with_name("config.yaml"), int(script.parent.name.split("_")[1])
        assert f"\n#SBATCH --nodes={nodes} " in text and "\n#SBATCH --partition=gpu" in text
        assert f"\n  --config {file}" in text and "--save=" not in text
        assert "\n# Written by megalite scaling. " in text
        config, notices = parse(["--config", str(file)])
        assert not notices
        assert (config.training.exit_interval, config.logging.metrics_file) == (
            4,
            str(file.with_name("metrics.jsonl")),
        )
        before = file.read_text()
        write_metrics(script.parent, config, nodes, length)
        file.write_text(before)
    table = list(measure_scaling(words, ""))
    assert [line.split()[5] for line in table if line.startswith("     ") and "%" in line] == [
        "100.0%",
        "80.0%",
    ]
    (line,) = measure_scaling([*words, "--lr", "0.5", "--json"], "")
    assert json.loads(line)["submit"] == commands


def test_a_job_that_was_killed_is_submitted_again(trials: _Runs, tmp_path: Path) -> None:
    """Check metrics that end in a part of a line."""
    words = [*TINY.split(), "--folder", str(tmp_path)]
    list(measure_scaling(words, ""))
    file = tmp_path / "nodes_2_batch_8" / "metrics.jsonl"
    file.write_text(file.read_text()[:-20])
    assert "2 nodes, 2 ranks, batch 8: 4 iterations" in list(measure_scaling(words, ""))
    assert len(trials.configs) == 4


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--folder .*/file cannot be used \("):
        list(measure_scaling([*TINY.split(), "--folder", str(tmp_path / "file")], ""))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--partition gpu", "--partition is for Slurm: pass --time too, Slurm's time limit"),
        ("--time 00:01:00", "--time 00:01:00 is too short"),
        ("--ethernet-gbps 3", "--ethernet-gbps is an option of megalite plan: remove it"),
        ("--iterations 3 --warmup-iterations 3", "leaves none of --iterations 3 to measure"),
        ("--train-iters 2", "--train-iters 2 is less than --iterations 4"),
        ("--dry-run", "--dry-run computes nothing"),
        ("--scaling 1,4096 --global-batch-size 4096", "--scaling 4096, which is 4096 ranks, is "),
    ],
)
def test_mistakes_in_a_measurement(words: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        list(measure_scaling([*TINY.split(), *words.split(), "--folder", str(tmp_path)], ""))
    assert message in str(caught.value)


def test_the_numbers_of_nodes_are_needed() -> None:
    with pytest.raises(UserError, match="--scaling is missing"):
        list(measure_scaling(TINY.replace("--scaling 1,2 ", "").split(), ""))
