"""Errors in functions of megatron-core, as they happen in parallel code: the judge finds each."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.cli.judge import judge_config, random_samples
from megalite.distributed.local_ranks import LocalRanks
from megalite.observe.judge.judge import ProgramJudge
from megalite.observe.judge.rank_record import Task, import_adapter
from megalite.observe.verify.layouts import Layout

PROGRAM = str(Path(__file__).with_name("megatron_errors.py"))
OF_RESUMES = ("SwiGLU saved as one matrix", "schedule not resumed")


@pytest.mark.slow
def test_each_error_is_found(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    module = import_adapter(PROGRAM)
    missed = []
    with LocalRanks() as ranks:
        for number, (name, error) in enumerate(module.ERRORS.items()):
            config = judge_config(error.flags, error.num_iterations, module)
            samples = random_samples(config)
            task = Task(PROGRAM, Layout(), config, {"error": name, **error.options}, samples)
            folder = tmp_path / str(number)
            folder.mkdir()
            judge = ProgramJudge(module, task, ranks, folder if name in OF_RESUMES else None)
            verdict = judge.run([Layout.parse(error.layout)])
            found = [each for each in verdict.different if each != "megalite"]
            print(f"{name}: {verdict.different or verdict.refused or 'not found'}", flush=True)
            missed += [] if found else [name]
    assert missed == []
