"""Job files of values that a shell or YAML would read otherwise: they arrive as they are, or are refused."""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from megalite.config.arguments import split_tokens
from megalite.plan import job_files
from megalite.plan.job_files import Kubernetes, Slurm, StartedRun, batch_script, pytorch_job
from megalite.plan.write_job import write_job
from megalite.utils.errors import UserError

PIECES = [
    *(
        "'",
        '"',
        "`>PWNED`",
        "$(>PWNED)",
        "<(>PWNED)",
        ";>PWNED;",
        "&& >PWNED",
        "|>PWNED",
        ">PWNED",
        "$HOME",
        "${x}",
    ),
    *(
        "}",
        "{a,b}",
        "*",
        "?",
        "[a-z]",
        "~",
        "~root",
        "!",
        "!!",
        "\\",
        "\\\\",
        "#",
        " #c",
        "%x",
        "%s",
        "=",
        "(",
        ")",
    ),
    *(
        "é",
        "日本",
        "\u3000",
        "\U0001f600",
        "-",
        "--",
        "-rf",
        ":",
        ": ",
        "- ",
        "&a",
        "*a",
        "@",
        "|",
        ">-",
        "[",
        "{",
    ),
    *("null", "on", "1e3", "0x1", ".inf", "$$", "$(NCCL_DEBUG)", "{{save}}", " ", "  ", "a", "b/c", ",", "]"),
]
LINES = ["\n", "\r\n", "\n#SBATCH --uid=0\n", "\n$(>PWNED)\n", "\t", "\x1b[2J", "\x85", "\u2028"]
"""Pieces with a character that ends a line, or controls a terminal."""


def _values(pieces: list[str], number: int) -> list[str]:
    """Return each piece, and joins of two to five of them, always the same."""
    chosen = random.Random(1)
    joined = ["".join(chosen.choices(pieces, k=chosen.randint(2, 5))) for _ in range(number)]
    return [*pieces, *joined][:number]


VALUES = ["", *_values(PIECES, 199)]
SLURM = Slurm(2, 4, 16, "20:00:00", "mine")
TOOLS = "scontrol srun scancel date head grep cut"


def _script(slurm: Slurm, tokens: list[str], save: str | None, file: str = "job.sbatch") -> str:
    return batch_script(slurm, StartedRun(tokens, "", file, "train", save), warn_seconds=300)


def _started(folder: Path, scripts: list[str]) -> list[list[str]]:
    """Run the scripts with functions for all programs, and return what each passes to srun.

    A program that is not one of these would not be found, and is recorded.
    """
    for number, script in enumerate(scripts):
        (folder / f"{number}.sbatch").write_text(script)
    work = folder / "work"
    work.mkdir()
    program = f"""
    PATH=/nonexistent SLURM_JOB_ID=7 SLURM_SUBMIT_DIR={work} SLURM_NNODES=2 SLURM_JOB_NODELIST='n[1-2]'
    for tool in {TOOLS}; do eval "$tool() {{ :; }}"; done
    srun() {{ printf '%s\\0' "$@" >{folder}/$number.words; }}
    command_not_found_handle() {{ echo "$@" >>{folder}/others; }}
    for ((number = 0; number < {len(scripts)}; number++)); do ( . {folder}/$number.sbatch ) >/dev/null; done
    """
    done = subprocess.run(["/bin/bash", "-c", program], capture_output=True, text=True, check=False)
    assert (done.stderr, list(work.iterdir()), (folder / "others").exists()) == ("", [], False)
    found = [(folder / f"{number}.words").read_bytes().decode() for number in range(len(scripts))]
    return [words.split("\0")[:-1] for words in found]


def _assigned(folder: Path, scripts: list[str]) -> list[list[str]]:
    """Return what the scripts would pass to srun, from their assignments, all in one process."""
    parts = []
    for script in scripts:
        part = script[script.index("\nsave=") : script.index("\n# --- Slurm warns")]
        part = re.sub(r"^(first_node|address)=\$\(.*", "", part, flags=re.MULTILINE)
        parts.append(f'{part}\nprintf \'%s\\0\' "${{launcher[0]}}" train "${{flags[@]}}" END')
    file, work = folder / "all", folder / "work"
    file.write_text("PATH=/nonexistent SLURM_JOB_ID=7 SLURM_NNODES=2 address=\n" + "\n".join(parts))
    work.mkdir()
    done = subprocess.run(["/bin/bash", file], cwd=work, capture_output=True, check=True)
    assert (done.stderr, list(work.iterdir())) == (b"", [])
    return [words.split("\0")[:-1] for words in done.stdout.decode().split("END\0")[:-1]]


@pytest.mark.parametrize("whole", [True, False], ids=["whole scripts", "assignments"])
def test_a_batch_script_passes_on_every_value_and_runs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    values, scripts = [*VALUES, *_values(LINES, 40)], []  # a file of settings may hold the latter
    tokens = ["--data-path", *(f"/{value}" for value in values), "--tokenizer-model", "t"]
    tokens += ["--exit-signal=-x", "--load=-$(>PWNED)"]
    if whole:
        values = ["", *("".join(PIECES[i : i + 12]) for i in range(0, len(PIECES), 12)), "".join(LINES)]
    for value in values:
        monkeypatch.setattr(job_files, "_python", lambda value=value: f"/{value}")
        scripts.append(_script(SLURM, [] if value else tokens, value or None))
    found = _started(tmp_path, scripts) if whole else _assigned(tmp_path, scripts)
    for value, words in zip(values, found, strict=True):
        assert f"/{value}" == words[words.index("-m") - 1 if whole else 0]
        flags = [word for word in words[words.index("train") + 1 :] if word != "--override-flags"]
        assert flags[-2:] == [f"--{name}={value or 'runs/mine-7'}" for name in ("save", "load")]
        assert split_tokens(flags[:-2])[0] == ([] if value else split_tokens(tokens)[0])


def _slurm_words(script: str) -> list[str]:
    """Return the options that Slurm reads: of the lines before the first that is no comment."""
    lines = [line.removeprefix("#SBATCH ") for line in re.findall(r"\A(?:#.*\n)+", script)[0].split("\n")]
    return [line.partition(" #")[0].rstrip() for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("field", ["name", "partition", "account", "exclude", "options"])
def test_an_option_of_slurm_is_refused_or_arrives(field: str) -> None:
    flag = {"name": "--job-name", "options": "--sbatch"}.get(field, f"--{field}")
    arrived = 0
    for value in [*VALUES, *_values(LINES, 40), "a.b_c-D1", "n3,n[7-9]"]:
        slurm = Slurm(2, 4, 16, "20:00:00", **({"name": "mine"} | {field: value}))  # type: ignore[arg-type]
        if field == "options":
            slurm = Slurm(2, 4, 16, "20:00:00", "mine", options=(f"qos={value}",))
        allowed = {"name": r"[A-Za-z0-9][A-Za-z0-9._-]*", "options": r"[^\s\"'`$\\#]*"}
        if not re.fullmatch(allowed.get(field, r"[^\s\"'`$\\#]+"), value):
            with pytest.raises(UserError, match=flag) as error:
                slurm.check()
            assert len(str(error.value).splitlines()) == 1
            continue
        slurm.check()
        arrived += 1
        option = {"name": "job-name", "options": "qos"}.get(field, field)
        assert f"--{option}={value}" in _slurm_words(_script(slurm, [], None))
    assert arrived >= 5


def test_a_control_character_is_refused_in_every_value(tmp_path: Path) -> None:
    file = tmp_path / "job"
    cluster = [
        "--nodes",
        "2",
        "--gpu",
        "a100-80",
        "--time",
        "1:00:00",
        "--preset",
        "llama2-7b",
        "-o",
        str(file),
    ]
    for value in [*_values(LINES, 30), "\udcff", "\0"]:
        for flag in ("--job-name", "--output", "--save", "--data-path", "--setup", "--sbatch", "--volume"):
            for words in ([flag, f"a{value}b"], [f"{flag}=a{value}b"]):
                with pytest.raises(
                    UserError, match=r"^\S.* has a line break or another control character"
                ) as error:
                    write_job([*cluster, *words], "")
                assert len(str(error.value).splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_the_command_that_submits_a_file_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "--nodes",
        "2",
        "--gpu",
        "a100-80",
        "--preset",
        "llama2-7b",
        "--tp",
        "4",
        "--pp",
        "2",
        "--mock-data",
    ]
    words += [
        "--global-batch-size",
        "64",
        "--micro-batch-size",
        "1",
        "--train-iters",
        "9",
        "--save",
        "/runs/a",
    ]
    words += {"slurm": ["--time", "9:00:00"], "kubernetes": ["--kubernetes", "m", "--volume", "r:/runs"]}[
        kind
    ]
    for name in ("-x $(>PWNED)", "it's"):
        command = write_job([*words, f"--output={name}"], "")[-1].partition("submit it with: ")[2]
        program = f'sbatch() {{ printf \'%s\\0\' "$@"; }}; kubectl() {{ sbatch "${{@:3}}"; }}; {command}'
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
        (passed,) = done.stdout.split("\0")[:-1]
        assert passed in (name, f"./{name}") and not passed.startswith("-")
        assert command in Path(name).read_text()
    assert len(list(tmp_path.iterdir())) == 2


def _expanded(word: str) -> str:
    """Return a word of a container's arguments as Kubernetes passes it on."""
    return re.sub(r"\$(\$|\(NCCL_DEBUG\))", lambda found: "$" if found[1] == "$" else "WARN", word)


def test_a_job_of_kubernetes_holds_every_value_as_text() -> None:
    values = [*VALUES, *_values(LINES, 40)]
    folders = [f"/{value}" for value in values if not re.search(r"\s", value) and value]
    volumes = tuple(f"claim{i}:{folder}" for i, folder in enumerate(dict.fromkeys(folders)))
    for value in ("$(>PWNED): [", "m:1 # no", "\n  evil: true"):
        job = Kubernetes(value, 2, 4, 16, "on", volumes, "rdma/x")
        tokens = [
            "--save",
            "/runs/a",
            "--data-path",
            *(f"/{each}" for each in values),
            f"--tokenizer-model={value}",
        ]
        run = StartedRun(tokens, "", "f", "train", "/runs/a", has_load=True)
        found = yaml.safe_load(pytorch_job(job, run, grace_seconds=300))
        assert found["metadata"]["name"] == "on"
        pod = found["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == value
        assert [_expanded(word) for word in container["args"]] == [
            *(
                "--save=/runs/a",
                "--data-path",
                *(f"/{each}" for each in values),
                f"--tokenizer-model={value}",
            ),
        ]
        assert [mount["mountPath"] for mount in container["volumeMounts"][1:]] == list(job.folders)


@pytest.mark.parametrize("field", ["--job-name", "--network", "--volume"])
def test_a_name_that_kubernetes_cannot_have_is_refused(field: str) -> None:
    for value in [*VALUES, *_values(LINES, 40)]:
        name, network, volume = (
            value if field == each else None for each in ("--job-name", "--network", "--volume")
        )
        job = Kubernetes(
            "m", 2, 4, 16, "mine" if name is None else name, ("r:/runs", volume or "c:/d"), network
        )
        allowed = r"[a-z]*" if field == "--job-name" else r"[a-zA-Z0-9._/-]*"
        if re.fullmatch(allowed, value):
            continue
        with pytest.raises(UserError, match=field) as error:
            job.check("/runs/a")
        assert len(str(error.value).splitlines()) == 1
