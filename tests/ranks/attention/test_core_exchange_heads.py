"""Recurrent layers of context-parallel ranks, against one rank with the whole samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.attention.positions import PositionInfo
from megalite.config.presets import PRESETS
from megalite.distributed.axes import MeshOptions
from megalite.distributed.axis import HeldPositions
from megalite.distributed.topology import Topology
from megalite.observe.operator_log import Traffic, ring_bytes
from tests.live_ranks import run_ranks
from tests.stages import build_stage

S, B, HIDDEN = 24, 2, 32
DELTA_NET = replace(
    PRESETS["llama-tiny"],
    **{"recurrent_mixer": "gated_delta_net", "linear_key_head_dim": 8, "linear_value_head_dim": 4},
    **{"linear_num_key_heads": 6, "linear_num_value_heads": 12},
)
MAMBA = replace(
    PRESETS["nemotron-h-tiny"],
    **{"mamba_num_groups": 6, "mamba_num_heads": 12, "mamba_head_dim": 4, "mamba_state_dim": 5},
)
CONFIGS = {
    name: replace(config, hidden_size=HIDDEN, vocab_size=101, params_dtype="fp64", init_method_std=0.3)
    for name, config in {"gated_delta_net": DELTA_NET, "mamba": MAMBA}.items()
}
STARTS = torch.stack((torch.arange(S) // 7 * 7, torch.arange(S) // 12 * 12))
"""First tokens of documents, of which some begin on one rank and end on another one."""


def _mixer(topology: Topology, name: str) -> torch.nn.Module:
    comm_type = "p2p" if topology.positions.is_zigzag else "a2a"
    return getattr(
        build_stage(CONFIGS[name], topology, range(1), seed=3, cp_comm_type=comm_type).layers["0"], name
    )


def _recurred(topology: Topology, name: str, has_documents: bool) -> list[Tensor]:
    """Return the output and the gradients of this rank: of its input, and of the parameters."""
    mixer, own = _mixer(topology, name), topology.positions
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(S, B, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    x = own.take(x, dim=0).clone().requires_grad_()
    positions = PositionInfo({}, document_starts=STARTS if has_documents else None)
    y = mixer(x, torch.arange(B), positions).x
    return [y.detach(), *torch.autograd.grad(y, [x, *mixer.parameters()], own.take(grad, dim=0))]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("num_ranks", "is_zigzag", "has_documents"), [(2, False, True), (2, True, False), (3, True, True)]
)
def test_a_recurrence_is_that_of_the_whole_sample(
    name: str, num_ranks: int, is_zigzag: bool, has_documents: bool, one_rank: Topology
) -> None:
    whole = _recurred(one_rank, name, has_documents)
    mesh = MeshOptions({"cp": num_ranks, "dp": 1}, is_zigzag=is_zigzag)
    ranks = run_ranks(_recurred, mesh, num_ranks, name, has_documents)
    for rank, found in enumerate(ranks):
        own = HeldPositions(rank, num_ranks, is_zigzag)
        expected = [own.take(x, dim=0) for x in whole[:2]]
        torch.testing.assert_close(found[:2], expected, rtol=1e-11, atol=1e-12)
    sums = [sum(each) for each in zip(*(found[2:] for found in ranks), strict=True)]
    torch.testing.assert_close(sums, whole[2:], rtol=1e-11, atol=1e-12)


def _bytes_sent(topology: Topology, name: str) -> list[float]:
    """Return the bytes that this rank sends in forward, and in forward with backward."""
    mixer, cp = _mixer(topology, name), topology.axes["cp"]
    shape, found = (S // cp.size, B, HIDDEN), []
    x = torch.randn(shape, dtype=torch.float64, device=topology.device, requires_grad=True)
    with Traffic(topology) as traffic:
        y = mixer(x, torch.arange(B, device=topology.device), PositionInfo({})).x
        found.append(ring_bytes(traffic.calls, "cp", cp.size))
        y.sum().backward()
        found.append(ring_bytes(traffic.calls, "cp", cp.size))
    return found


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_send_the_features_of_each_others_heads(name: str, num_ranks: int) -> None:
    """On ranks, and on meta tensors as in a dry run."""
    config = CONFIGS[name]
    of_keys, of_groups = (6 * sum(sizes.group_rows) for sizes in (config.delta_net, config.mamba))
    projected = of_groups if name == "mamba" else of_keys
    elements = S / num_ranks * B * (projected + 12 * 4) * (num_ranks - 1) / num_ranks
    expected = [8 * elements, 2 * 8 * elements]
    mesh = MeshOptions({"cp": num_ranks, "dp": 1}, is_zigzag=True)
    assert run_ranks(_bytes_sent, mesh, num_ranks, name) == [expected] * num_ranks
    with Topology.fake(mesh, num_ranks, num_ranks - 1) as topology:
        assert _bytes_sent(topology, name) == expected
