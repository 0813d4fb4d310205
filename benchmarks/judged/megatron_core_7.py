"""The z-loss that Megatron logs is one rank's own, and not the mean over data-parallel ranks (0.16.1)."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def start(rank, size, **sizes):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29547", CUDA_DEVICE_MAX_CONNECTIONS="1")
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.cuda.current_device = lambda: "cpu"
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(**sizes)


def rank(rank):
    start(rank, 2)
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils, router

    moe_utils.te_general_gemm = None  # 0.16.1 does not define it without Transformer Engine
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_z_loss_coeff=1.0,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    gate = router.TopKRouter(config, ProcessGroupCollection.use_mpu_process_groups())
    gate.layer_number = 1
    gate.weight.data = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    gate(torch.randn(16, 1, 8, generator=torch.Generator().manual_seed(rank)))
    totals = {}
    moe_utils.track_moe_metrics(1.0, 0, total_loss_dict=totals, track_names=["z_loss"], num_layers=1)
    print(f"rank {rank}: logged z_loss {totals['z_loss']:.6f} (should be equal on both ranks)")


if __name__ == "__main__":
    mp.spawn(rank, nprocs=2)
