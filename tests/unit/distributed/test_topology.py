"""Who is where in the world, and what the launcher may say of it."""

import itertools
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from megalite.config import ParallelConfig
from megalite.distributed import rendezvous, topology
from megalite.distributed.axes import MeshOptions
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.train.rank_training import _refuse_several_ranks
from megalite.utils.errors import UserError
from megalite.utils.hardware import process_settings
from tests.programs import free_port

WORLD = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
LOCAL = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def layout(tp=1, pp=1, dp=None):
    return ParallelConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, data_parallel_size=dp
    )


@pytest.fixture
def environment(monkeypatch):
    """Sets exactly these variables of the launcher's."""

    def set_variables(variables):
        for name in (*WORLD, *LOCAL, "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


@pytest.mark.parametrize("rank", [0, 7, 8, 1023, 1024, 2345, 4095])
def test_ranks_of_a_large_world(rank):
    tp_size, pp_size, dp_size = 8, 4, 128
    with Topology.fake(layout(tp_size, pp_size).mesh, 4096, rank) as topology:
        tp, dp, pp = rank % tp_size, rank // tp_size % dp_size, rank // (tp_size * dp_size)
        assert (topology.tp.rank, topology.dp.rank, topology.pp.rank) == (tp, dp, pp)
        assert (topology.tp.size, topology.dp.size, topology.pp.size) == (tp_size, dp_size, pp_size)
        assert topology.tp.ranks == tuple((pp * dp_size + dp) * tp_size + i for i in range(tp_size))
        assert topology.dp.ranks == tuple((pp * dp_size + i) * tp_size + tp for i in range(dp_size))
        assert topology.pp.ranks == tuple((i * dp_size + dp) * tp_size + tp for i in range(pp_size))
        for axis in (topology.tp, topology.dp, topology.pp):
            assert dist.get_process_group_ranks(axis.group) == list(axis.ranks)
            assert (axis.is_first, axis.is_last) == (axis.rank == 0, axis.rank == axis.size - 1)
        assert topology.is_reporter == (rank == 4095)


def test_messages_of_a_dry_run(monkeypatch):
    """torch registers the backend of a process's first fake group late, and then forgets devices."""
    monkeypatch.delitem(sys.modules, "torch.testing._internal.distributed.fake_pg", raising=False)
    with Topology.fake(layout(1, 2).mesh, 2, 0) as topology:
        for group in (topology.pp.group, topology.world.group):
            message = dist.P2POp(dist.isend, torch.empty(1, device="meta"), group=group, group_peer=1)
            dist.batch_isend_irecv([message])


@pytest.mark.parametrize("rank", [0, 5, 21, 46, 47])
def test_zero_shards_over_neighbours(rank):
    """Six replicas of two ranks, in groups of three, on each of four stages."""
    parallel = replace(layout(2, 4, 6), zero_stage=1, data_parallel_shard_degree=3)
    with Topology.fake(parallel.mesh, 48, rank) as topology:
        dp = topology.dp
        assert dp.shard.ranks == dp.ranks[dp.rank // 3 * 3 :][:3]
        assert dp.replicate.ranks == dp.ranks[dp.rank % 3 :: 3]
        assert (dp.shard.rank, dp.replicate.rank) == (dp.rank % 3, dp.rank // 3)
        for axis in dp.parts:
            assert dist.get_process_group_ranks(axis.group) == list(axis.ranks)
            assert axis.ranks[axis.rank] == rank
            assert axis.observers is topology.observers


def test_one_group_is_the_axis_itself():
    with Topology.fake(layout(1, 1, 4).mesh, 4, 2) as topology:
        assert topology.dp.shard is topology.dp
        assert topology.dp.parts == (topology.dp,)


def test_a_node_that_holds_one_replica_has_nothing_to_shard():
    parallel = replace(layout(4, 1, 2), zero_stage=1, data_parallel_shard_degree=0)
    message = "pass --data-parallel-shard-degree N, or remove it"
    with pytest.raises(UserError, match=message), Topology.start(parallel.mesh, Launch(0, 8, 0, 4)):
        pass


@pytest.mark.parametrize(("pp", "dp"), [(1, 4), (2, 1), (4, 1), (2, 3)])
def test_gradients_of_a_pipeline_have_a_group_of_their_own(pp, dp):
    with Topology.fake(layout(1, pp, dp).mesh, pp * dp, 0) as found:
        assert (found.dp.backward_group, found.tp.backward_group) == (None, None)
        if pp == 1:
            assert found.pp.backward_group is None
        else:
            assert dist.get_process_group_ranks(found.pp.backward_group) == list(found.pp.ranks)
            assert found.pp.backward_group.group_name != found.pp.group.group_name


class NcclOptions(Backend.Options):
    """Takes the place of torch's, which a torch for CPUs does not have."""

    def __init__(self, is_high_priority_stream=False):
        super().__init__("nccl")
        self.is_high_priority_stream = is_high_priority_stream


@pytest.mark.parametrize(
    ("pp", "dp", "tp", "shard"), [(2, 4, 2, None), (1, 4, 1, None), (2, 1, 2, None), (1, 4, 1, 2)]
)
def test_groups_on_gpus(monkeypatch, pp, dp, tp, shard):
    """Collectives between replicas alone have streams of high priority; a pipeline has a second group."""
    made, split = {}, []

    def new_group(ranks=None, pg_options=None, group_desc=None, **_):
        made.setdefault(group_desc, set()).add(pg_options and pg_options.is_high_priority_stream)
        return make(ranks=ranks, group_desc=group_desc)

    def split_group(split_ranks, group_desc, pg_options=None):
        split.append((split_ranks, group_desc, pg_options and pg_options.is_high_priority_stream))
        return dist.new_subgroups_by_enumeration(split_ranks, group_desc=group_desc)[0]

    make = dist.new_group
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("", (), {"Options": NcclOptions}), raising=False)
    monkeypatch.setattr("torch.distributed.device_mesh.new_group", new_group)
    monkeypatch.setattr(dist, "split_group", split_group)
    mesh = replace(layout(tp, pp, dp), data_parallel_shard_degree=shard).mesh
    with Topology.fake(mesh, pp * dp * tp, 0, device="cuda:0") as found:
        # Also where all ranks are replicas, they do not use the group of the world.
        assert made.pop("mesh_dp") == {True if dp > 1 else None}
        assert all(each == {None} for each in made.values())
        lines = [[line, line + dp * tp] for line in range(dp * tp)]
        parts = [([[0, 2], [1, 3]], "mesh_dp_replicate", True), ([[0, 1], [2, 3]], "mesh_dp_shard", True)]
        assert split == ([(lines, "mesh_pp_backward", None)] if pp == 2 else []) + (parts if shard else [])
        assert found.device == torch.device("cuda:0")


@pytest.mark.parametrize(("tp", "pp", "dp"), list(itertools.product((1, 2, 3), repeat=3)))
def test_every_layout_of_small_worlds(tp, pp, dp):
    world_size = tp * pp * dp
    places = set()
    for rank in range(world_size):
        with Topology.fake(layout(tp, pp, dp).mesh, world_size, rank) as topology:
            places.add((topology.pp.rank, topology.dp.rank, topology.tp.rank))
            for axis in (topology.tp, topology.dp, topology.pp):
                assert axis.ranks[axis.rank] == rank
    assert len(places) == world_size


@pytest.mark.parametrize(
    ("parallel", "world_size"),
    [(layout(2, 2), 6), (layout(2, 2), 2), (layout(1, 1, 3), 4), (layout(2, 1, 1), 4)],
)
def test_world_of_another_size_is_refused_before_any_process_group(parallel, world_size):
    launch = Launch(world_size - 1, world_size, 0, 1)  # a process group would wait for the others
    cause = rf"world size {world_size} is not tp .* start \d+ ranks"
    with pytest.raises(UserError, match=cause), Topology.start(parallel.mesh, launch):
        pass
    with pytest.raises(UserError, match=cause), Topology.fake(parallel.mesh, world_size, 0):
        pass
    assert not dist.is_initialized()


def test_one_rank_needs_no_network(environment):
    environment({})
    with Topology.start(ParallelConfig().mesh, Launch.from_environment()) as topology:
        assert (topology.rank, topology.world_size) == (0, 1)
        assert topology.is_reporter
    assert not dist.is_initialized()


def test_process_group_ends_with_an_error():
    with pytest.raises(ZeroDivisionError), Topology.start(ParallelConfig().mesh, Launch(0, 1, 0, 1)):
        raise ZeroDivisionError
    assert not dist.is_initialized()


def pretend_gpus(monkeypatch, count, visible):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.parametrize(
    ("count", "visible", "launch", "index"),
    [(8, "", Launch(11, 16, 3, 8), 3), (1, "5", Launch(3, 8, 3, 8), 0), (1, "", Launch(3, 8, 0, 1), 0)],
)
def test_each_rank_has_a_gpu(monkeypatch, count, visible, launch, index):
    pretend_gpus(monkeypatch, count, visible)
    assert topology._pick_device(MeshOptions(), launch) == torch.device("cuda", index)
    assert topology._pick_device(MeshOptions(backend="gloo"), launch) == torch.device("cpu")


@pytest.mark.parametrize(("count", "told"), [(1, "1 GPU:"), (2, "2 GPUs:")])
def test_more_ranks_than_gpus_are_refused_on_each_of_them(monkeypatch, count, told):
    pretend_gpus(monkeypatch, count, "")
    for rank in range(4):
        with pytest.raises(UserError, match=f"4 ranks on a machine with {told} .*--distributed-backend gloo"):
            topology._pick_device(MeshOptions(), Launch(rank, 4, rank, 4))


def test_ranks_share_gpus_over_an_nccl_that_allows_it(monkeypatch):
    pretend_gpus(monkeypatch, 2, "")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    options = ParallelConfig(ranks_share_gpus=True).mesh
    monkeypatch.setattr(process_settings, "loaded_nccl", lambda: (2, 28, 9))
    assert topology._pick_device(options, Launch(1, 2, 1, 2)) == torch.device("cuda", 1)
    with pytest.raises(
        UserError, match=r"NCCL 2.30 or later, .* NCCL 2.28.9: type pip .*nvidia-nccl-cu13"
    ) as error:
        topology._pick_device(options, Launch(2, 5, 2, 5))
    assert "\n" not in str(error.value)
    monkeypatch.setattr(process_settings, "loaded_nccl", lambda: (2, 30, 3))
    ranks = [topology._pick_device(options, Launch(rank, 5, rank, 5)) for rank in range(5)]
    assert [device.index for device in ranks] == [0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("variables", "launch"),
    [
        ({}, Launch(0, 1, 0, 1)),
        ({"MASTER_ADDR": "node1", "MASTER_PORT": "1"}, Launch(0, 1, 0, 1)),  # a cluster's profile sets them
        (WORLD, Launch(3, 8, 3, 8)),
        ({**WORLD, **LOCAL}, Launch(3, 8, 1, 2)),
        ({**WORLD, "LOCAL_WORLD_SIZE": "2"}, Launch(3, 8, 1, 2)),
        ({**WORLD, "SLURM_STEP_NUM_TASKS": "4"}, Launch(3, 8, 3, 8)),  # srun torchrun
        ({"SLURM_NTASKS": "4"}, Launch(0, 1, 0, 1)),  # one process under salloc or in a batch script
        ({"SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "1"}, Launch(0, 1, 0, 1)),
    ],
)
def test_launch_from_environment(variables, launch, environment):
    environment(variables)
    assert Launch.from_environment() == launch


@pytest.mark.parametrize(
    ("name", "launcher"),
    [("SLURM_STEP_NUM_TASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun"), ("PMI_SIZE", "mpirun")],
)
def test_processes_without_ranks_are_refused(name, launcher, environment):
    environment({name: "4"})
    told = rf"{launcher} has started 4 processes \({name}\), .* torchrun on each node .* or set RANK, "
    with pytest.raises(UserError, match=told):
        Launch.from_environment()
    with pytest.raises(UserError, match=f"--dry-run is one process, but {launcher} has started 4"):
        _refuse_several_ranks("--dry-run")


@pytest.mark.parametrize(("hosts", "told"), [("n1,n2", "host, n1"), ("n1 n2", "host, n1"), ("", "host")])
def test_the_address_of_rank_0_is_one_host(hosts, told, environment):
    environment({**WORLD, "MASTER_ADDR": hosts})
    with pytest.raises(UserError, match=f"is not one host: set it to rank 0's {told}$"):
        Launch.from_environment()


@pytest.mark.parametrize("missing", WORLD)
def test_each_missing_variable_is_named(missing, environment):
    environment({name: value for name, value in WORLD.items() if name != missing})
    with pytest.raises(UserError, match=rf"set but not {missing}: set all four"):
        Launch.from_environment()


@pytest.mark.parametrize("text", ["", "two", "-1", "1.0", "²"])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", *LOCAL])
def test_no_number_is_named(name, text, environment):
    environment({**WORLD, name: text})
    with pytest.raises(UserError, match=f"{name}='{text}' is not a number"):
        Launch.from_environment()


def test_a_failure_on_a_gpu_is_told_without_a_wait_for_the_other_ranks(monkeypatch):
    pretend_gpus(monkeypatch, 1, "")
    left = []
    monkeypatch.setattr(topology, "_join", lambda *_: None)
    monkeypatch.setattr(topology, "_from_mesh", lambda *_: None)
    monkeypatch.setattr(topology, "_start_backward_thread", lambda _: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append(True))
    with pytest.raises(ZeroDivisionError), Topology.start(ParallelConfig().mesh, Launch(0, 1, 0, 1)):
        raise ZeroDivisionError
    assert not left
    with Topology.start(ParallelConfig().mesh, Launch(0, 1, 0, 1)):
        pass
    assert left


def test_a_rank_that_refuses_its_flags_ends_the_others(environment):
    """It has no config to compare, and the others would wait for it until their time-out."""
    port = free_port()
    environment({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "1", "WORLD_SIZE": "2"})
    raised = []

    def start():
        try:
            with Topology.start(layout().mesh, Launch(0, 2, 0, 2), must_agree={"--seed": "5"}):
                pass
        except UserError as error:
            raised.append(str(error))

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    with pytest.raises(UserError, match=r"^unknown flag --lrr$"), rendezvous.refusal_reported():
        raise UserError("unknown flag --lrr")
    thread.join(300.0)
    assert raised == ["rank 1 alone: unknown flag --lrr"]


def test_a_refusal_of_all_ranks_is_not_waited_with(environment, monkeypatch):
    monkeypatch.setattr(rendezvous, "_SECONDS_TO_REFUSE", 0.3)
    free = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    for variables in ({}, {"RANK": "1"}, free | {"RANK": "0"}, free | {"RANK": "1"}):
        environment(variables)
        with pytest.raises(UserError, match="of them all"), rendezvous.refusal_reported():
            raise UserError("of them all")


def addresses_that_listen(port):
    """Local addresses of this machine's sockets that listen on a port, in the kernel's hexadecimal."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            address, _, state = line.split()[1:4]
            if state == "0A" and int(address.split(":")[1], 16) == port:
                found.add(address.split(":")[0])
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the table of sockets is Linux's")
@pytest.mark.parametrize("master", ["127.0.0.1", "localhost"])
def test_the_store_of_one_machines_ranks_listens_on_loopback(environment, master):
    port = free_port()
    environment(WORLD | {"MASTER_ADDR": master, "MASTER_PORT": str(port)})
    start, timeout = rendezvous._store_of_start, timedelta(seconds=600)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: start(Launch(rank, 2, rank, 2), timeout), range(2))
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert addresses_that_listen(port) <= {"0100007F", "00000000000000000000000001000000"}
    assert addresses_that_listen(port)


def test_a_taken_port_is_told(environment):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        environment(WORLD | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        with (
            pytest.raises(UserError, match=rf"no rendezvous at .* 127.0.0.1:{port} \(.*in use\)"),
            Topology.start(layout(2).mesh, Launch(0, 2, 0, 2)),
        ):
            pass


def test_ranks_whose_rank_0_is_gone_wait_no_longer_than_their_time_out(monkeypatch):
    """Each of them says so, as rank 0 does not; torch's own wait may take twice the time-out."""
    monkeypatch.setattr(rendezvous, "rendezvous", lambda *_, **__: pytest.fail("torch's own wait"))
    parallel, launch = ParallelConfig(distributed_timeout_minutes=0.001), Launch(1, 2, 1, 2)
    with socket.socket() as taken:  # a port at which nothing listens
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with (
            pytest.raises(UserError, match=r"rank 1: no rendezvous at .*nothing listened there") as error,
            Topology.start(parallel.mesh, launch),
        ):
            pass
    assert error.value.on_one_rank
