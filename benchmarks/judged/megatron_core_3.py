"""Learnable attention sinks are cut over heads and not marked so: the gradient norm misses rank 1's (0.16.1)."""

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
    start(rank, 2, tensor_model_parallel_size=2)
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate as counted
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        softmax_type="learnable",
        tensor_model_parallel_size=2,
    )
    sinks = DotProductAttention(config, 1, AttnMaskType.causal, "self").softmax_offset
    print(f"rank {rank}: {sinks.numel()} of 4 sinks; counted in the norm: {counted(sinks)} (should be True)")


if __name__ == "__main__":
    mp.spawn(rank, nprocs=2)
