"""The last collectives of each rank after a hang, and the program that compares them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C import _distributed_c10d

from megalite.distributed.topology import Topology
from megalite.train.callbacks.hang_report import PREFIX, analysis_of, recorder_of, write_records
from tests.programs import run_program

NOT_BEFORE = pytest.mark.skipif(
    not hasattr(_distributed_c10d, "_dump_fr_trace"), reason="this torch does not record gloo's collectives"
)


@NOT_BEFORE
def test_a_file_has_the_last_collectives(one_rank: Topology, tmp_path: Path) -> None:
    dist.barrier()
    recorder = recorder_of("cpu")
    assert recorder is not None
    file = tmp_path / "hang" / f"{PREFIX}00000"
    write_records(file, recorder)
    assert pickle.loads(file.read_bytes())["entries"][-1]["profiling_name"] == "gloo:barrier"
    command = analysis_of(file.parent, "cpu").replace("*", "00000").split()
    text = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, check=True).stdout
    assert "gloo:barrier" in text


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_nothing_is_written_where_the_user_turned_it_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0")
    assert recorder_of("cpu") is None


def test_a_device_without_a_recorder_has_none() -> None:
    assert recorder_of("meta") is None


def records_of_nccl(number: int) -> dict[str, Any]:
    """Return records of an all-reduce as NCCL's are, without stacks."""
    entry = {
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "mesh_dp"),
        "collective_seq_id": number + 1,
        "p2p_seq_id": 0,
        "op_id": number + 1,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": "scheduled",
        "is_p2p": False,
    }
    groups = {"0": {"name": "0", "desc": "mesh_dp", "ranks": "[0, 1, 2]"}}
    return {"version": "2.10", "pg_config": groups, "pg_status": {}, "entries": [entry]}


def test_torch_s_program_reads_the_files_of_the_ranks_that_answered(tmp_path: Path) -> None:
    """Rank 2 is silent. The stacks beside the records do not confuse it."""
    fr_trace = pytest.importorskip("torch.distributed.flight_recorder.fr_trace")
    for rank in range(2):
        write_records(tmp_path / f"{PREFIX}{rank:05}", lambda **_: pickle.dumps(records_of_nccl(0)))
        (tmp_path / f"rank_{rank:05}.txt").write_text("thread MainThread:")
    program, *arguments = analysis_of(tmp_path, "cuda").split()
    assert program == "torchfrtrace"
    found = run_program(fr_trace.__file__, *arguments)
    assert found.returncode == 0, found.stderr
    assert "{2}" in found.stderr + found.stdout
