"""EP 1, ETP 1, TP 2: gradients of experts are not summed over the ranks that hold the same expert (0.16.1).

ColumnParallelLinear marks a weight with allreduce=False only if EP > 1 (tensor_parallel/layers.py), so
DistributedDataParallel reduces it over dp (1 rank), not over expert dp (2 ranks).
"""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def start(rank, size, **sizes):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29541", CUDA_DEVICE_MAX_CONNECTIONS="1")
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.cuda.current_device = lambda: "cpu"
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(**sizes)


def rank(rank):
    start(rank, 2, tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=2,
        num_moe_experts=2,
        tensor_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        sequence_parallel=True,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    layer = ColumnParallelLinear(
        4,
        4,
        config=config,
        init_method=torch.nn.init.ones_,
        bias=False,
        is_expert=True,
        tp_group=parallel_state.get_expert_tensor_parallel_group(),
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), layer)
    model.zero_grad_buffer()
    model(torch.full((1, 4), 1.0 + rank))[0].sum().backward()  # each rank has tokens of its own
    model.finish_grad_sync()
    print(
        f"rank {rank}: full expert {tuple(layer.weight.shape)}, gradient {layer.weight.main_grad[0, 0]:.2f} "
        f"(right: 3 on both ranks)",
        getattr(layer.weight, "allreduce", None),
    )


if __name__ == "__main__":
    mp.spawn(rank, nprocs=2)
