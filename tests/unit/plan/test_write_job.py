"""Batch scripts: valid bash with the requested options, and rejected if the run does not fit."""

from __future__ import annotations

import re
import resource
import shlex
import subprocess
from pathlib import Path

import pytest

from megalite.frontends.command_line import parse
from megalite.plan.job_files import seconds_of, slurm_limit
from megalite.plan.write_job import duration_text, write_job, write_script
from megalite.utils.errors import ConfigError, UserError

ROOT = Path(__file__).parents[3]

CLUSTER = ("--nodes", "2", "--gpu", "a100-80", "--gpus-per-node", "4", "--time", "20:00:00")
RUN = (
    *("--preset", "llama2-7b", "--global-batch-size", "64", "--bf16", "--train-iters", "1000"),
    *("--save-interval", "100", "--data-path", "data/corpus"),
)
LAYOUT = ("--tp", "4", "--pp", "2", "--micro-batch-size", "1")


def _job(tmp_path: Path, *words: str, cluster: tuple[str, ...] = CLUSTER) -> tuple[str, list[str]]:
    """Return the script, and the lines to print."""
    file = tmp_path / "job.sbatch"
    said = write_job([*cluster, "--output", str(file), *words], "")
    return file.read_text(), said


def _flags(script: str, environment: str = "") -> list[str]:
    """Return the flags of pretrain_gpt.py, as bash expands them."""
    array = re.search(r"^flags=\(\n.*?^\)$", script, re.MULTILINE | re.DOTALL)
    assert array
    program = f'{environment}\n{array[0]}\nprintf "%s\\0" "${{flags[@]}}"'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def test_the_script_is_bash_and_holds_what_was_asked_for(tmp_path: Path) -> None:
    more = (
        "--partition",
        "gpu",
        "--account",
        "me",
        "--exclude",
        "n[1-2]",
        "--sbatch",
        "qos=high",
        "exclusive",
    )
    script, _ = _job(tmp_path, *RUN, *LAYOUT, *more, "--setup", "module load cuda")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    options = [
        line.split("#", 2)[1].removeprefix("SBATCH ").strip()
        for line in script.splitlines()
        if "#SBATCH" in line
    ]
    assert {
        *("--nodes=2", "--gpus-per-node=4", "--cpus-per-task=16", "--time=20:00:00", "--partition=gpu"),
        *(
            "--account=me",
            "--exclude=n[1-2]",
            "--qos=high",
            "--exclusive",
            "--signal=B:USR1@300",
            "--requeue",
        ),
    } <= set(options)
    assert "\nmodule load cuda\n" in script and "{{" not in script
    given = _flags(script, "save=runs/x")
    assert given == [
        *RUN,
        "--tp",
        "4",
        "--pp",
        "2",
        "--micro-batch-size",
        "1",
        "--save=runs/x",
        "--load=runs/x",
    ]


def test_words_reach_the_program_as_they_were_given(tmp_path: Path) -> None:
    odd = "/data/it's $HOME `a` \\ b"
    script, _ = _job(tmp_path, *RUN[:-1], odd, *LAYOUT, "--save", odd)
    save = next(line for line in script.splitlines() if line.startswith("save="))
    flags = _flags(script, save)
    assert flags[flags.index("--data-path") + 1] == odd
    assert f"--save={odd}" in flags


def test_a_file_of_settings_keeps_its_own_load(tmp_path: Path) -> None:
    """Check that the script does not override the --load of a file."""
    file = tmp_path / "run.yaml"
    file.write_text("checkpoint:\n  save: runs/mine\n  load: runs/mine\n")
    script, said = _job(tmp_path, *RUN, *LAYOUT, "--config", str(file))
    assert "\nsave=runs/mine" in script
    assert "--load" not in _flags(script)
    assert not any("--load" in line for line in said)


def test_a_job_whose_starts_choose_the_layout(tmp_path: Path) -> None:
    script, said = _job(tmp_path, *RUN, "--layout", "auto")
    flags = _flags(script)
    assert flags[flags.index("--layout") + 1] == "auto"
    assert not {"--tp", "--pp", "--micro-batch-size"} & set(flags)
    assert "Train on 8 GPUs, in the layout that each start chooses." in script
    assert any("fits, " in line for line in said)


def test_a_search_gives_the_layout(tmp_path: Path) -> None:
    script, said = _job(tmp_path, *RUN, "--search")
    flags = _flags(script)
    sizes = int(flags[flags.index("--tp") + 1]), int(flags[flags.index("--pp") + 1])
    dp = 8 // (sizes[0] * sizes[1])
    assert f"tensor-parallel {sizes[0]} x pipeline-parallel {sizes[1]} x data-parallel {dp}." in script
    assert any("fits, " in line for line in said)


def test_what_does_not_fit_is_refused_with_what_would(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        _job(tmp_path, *RUN, "--tp", "1", "--pp", "1", "--micro-batch-size", "8", "--zero-stage", "0")
    message = str(error.value)
    needed, available, too_much = map(float, re.findall(r"([\d.]+) GB", message)[:3])
    assert needed - available == pytest.approx(too_much, abs=0.11)
    layout = message.split("or the layout ")[1]
    assert not (tmp_path / "job.sbatch").exists()
    assert any("fits, " in line for line in _job(tmp_path, *RUN, *layout.split())[1])


def test_what_training_would_refuse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="8"):
        _job(tmp_path, *RUN, "--tp", "3", "--pp", "1", "--micro-batch-size", "1")


def _warnings(tmp_path: Path, *words: str, time: str = "20:00:00") -> str:
    cluster = (*CLUSTER[:-1], time)
    said = _job(tmp_path, *words, *LAYOUT, cluster=cluster)[1]
    return "\n".join(line for line in said if line.startswith("warning: "))


@pytest.mark.parametrize(
    ("flags", "time", "expected"),
    [
        (("--save-interval", "900000"), "20:00:00", "is shorter than --save-interval 900000, which takes"),
        (
            ("--save-interval-minutes", "1500"),
            "20:00:00",
            "is shorter than --save-interval-minutes 1500, which takes 25.0 hours",
        ),
        (
            ("--exit-duration-in-mins", "1199"),
            "20:00:00",
            "--exit-duration-in-mins 1199 is later than the warning",
        ),
        (("--load", "runs/other"), "20:00:00", "--load runs/other is not --save: every restart"),
        (("--train-iters", "100000"), "20:00:00", "starts of 20:00:00"),
        ((), "6", "leaves 60 seconds to train"),
    ],
)
def test_warnings(tmp_path: Path, flags: tuple[str, ...], time: str, expected: str) -> None:
    assert expected in _warnings(tmp_path, *RUN, *flags, time=time)


@pytest.mark.parametrize("time", ["5", "6"])  # refused, and warned about
def test_a_time_limit_that_is_too_short_is_met_with_one_that_is_not(tmp_path: Path, time: str) -> None:
    try:
        said = _warnings(tmp_path, *RUN, "--force", time=time)
    except UserError as error:
        said = str(error)
    wanted = re.search(r"pass --time (\S+) or longer", said)
    assert wanted
    assert "to train before the job is warned" not in _warnings(tmp_path, *RUN, "--force", time=wanted[1])
    assert seconds_of(wanted[1]) > 60 * int(time)


def test_flags_behind_the_scripts_name_replace_its_own(tmp_path: Path) -> None:
    script, _ = _job(tmp_path, *RUN, *LAYOUT)
    words = re.search(r"-m megalite train (.*) &$", script, re.MULTILINE)
    assert words
    before = _flags(script, "save=runs/x")
    array = f"flags=({shlex.join(before)})"
    own = ["--save-interval", "10", "--tensor-model-parallel-size", "8"]
    command = ["bash", "-c", f'{array}\nprintf "%s\\0" {words[1]}', "job.sbatch", *own]
    given = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    config, notices = parse(given)
    assert (config.checkpoint.save_interval, config.parallel.tp) == (10, 8)
    assert notices == parse(before)[1]


@pytest.mark.parametrize("name", ["pretrain_gpt_multi_node", "pretrain_bloom"])
def test_the_scripts_that_ship_say_so_too(name: str) -> None:
    script = (ROOT / "scripts" / f"{name}.sbatch").read_text()
    assert 'pretrain_gpt.py "${flags[@]}" --override-flags "$@"' in script


def test_a_sound_job_has_no_warning(tmp_path: Path) -> None:
    assert _warnings(tmp_path, *RUN) == ""


def test_missing_intervals_and_data_are_warned_about(tmp_path: Path) -> None:
    message = _warnings(tmp_path, *RUN[:5])
    assert "--save-interval is not set" in message and "--data-path is not set" in message
    assert "the run has no length: pass --train-iters" in message
    assert "vocabulary" not in message  # the preset's


def test_an_unknown_vocabulary_is_warned_about(tmp_path: Path) -> None:
    tiny = ("--preset", "gpt-tiny", "--padded-vocab-size", "512", "--global-batch-size", "64", *RUN[5:])
    assert "the vocabulary size is unknown: pass --vocab-size" in _warnings(tmp_path, *tiny)
    assert "vocabulary" not in _warnings(tmp_path, *tiny, "--tokenizer-type", "byte", "--force")


def test_a_file_is_not_lost(tmp_path: Path) -> None:
    _job(tmp_path, *RUN, *LAYOUT)
    with pytest.raises(UserError, match="exists already: pass another file, or --force"):
        _job(tmp_path, *RUN, *LAYOUT)
    _job(tmp_path, *RUN, *LAYOUT, "--force")


def test_a_full_disk_leaves_no_file_that_the_same_command_would_refuse_to_replace(tmp_path: Path) -> None:
    output = tmp_path / "job.sbatch"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        with pytest.raises(UserError, match=r"job.sbatch cannot be written \(File too large\)"):
            write_script(output, "a script", force=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not output.exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--partition", "a b"), "--partition 'a b' has a space"),
        (
            ("--exclude", "n1#n2"),
            "--exclude 'n1#n2' has a space, a quote, a backslash, a dollar or a number sign",
        ),
        (("--dry-run",), "--dry-run is one process"),
        (("--sbatch", "3=x"), "--sbatch 3=x is not an option"),
        (("--sbatch", "time=1"), "--sbatch time=1: the script depends on it; pass --time instead"),
        (("--json",), "--json is an option of megalite plan"),
    ],
)
def test_bad_input(tmp_path: Path, words: tuple[str, ...], expected: str) -> None:
    with pytest.raises(UserError, match=re.escape(expected)):
        _job(tmp_path, *RUN, *LAYOUT, *words)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("20:00:00", 72000),
        ("2-12", 216000),
        ("1-00:30", 88200),
        ("1-00:00:01", 86401),
    ],
)
def test_time_limits(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "1h", "1:2:3:4", "-5", "UNLIMITED", "٩٠", "90\n"])
def test_what_is_no_time_limit(text: str) -> None:
    with pytest.raises(UserError, match="is not a time limit: pass minutes"):
        seconds_of(text)


@pytest.mark.parametrize(
    ("seconds", "limit"), [(60, "00:01:00"), (61, "00:02:00"), (86399, "1-00:00:00"), (300000, "3-11:20:00")]
)
def test_limits_as_slurm_takes_them(seconds: int, limit: str) -> None:
    assert slurm_limit(seconds) == limit
    assert seconds_of(limit) - seconds in range(60)


def test_lengths_in_words() -> None:
    assert [duration_text(each) for each in (59, 7200, 86400 * 3.5)] == [
        "59 seconds",
        "2.0 hours",
        "3.5 days",
    ]
