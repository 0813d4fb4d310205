"""The router's auxiliary loss with calculate_per_token_loss is scaled by local tokens: tp times too small (0.16.1)."""

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


def rank(rank, tp):
    start(rank, tp, tensor_model_parallel_size=tp)
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils, router

    moe_utils.te_general_gemm = None  # 0.16.1 does not define it without Transformer Engine
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_aux_loss_coeff=1.0,
        calculate_per_token_loss=True,
        add_bias_linear=False,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        use_cpu_initialization=True,
    )
    gate = router.TopKRouter(config, ProcessGroupCollection.use_mpu_process_groups())
    gate.layer_number = 1
    generator = torch.Generator().manual_seed(0)
    gate.weight.data = torch.randn(4, 8, generator=generator)
    tokens = torch.randn(16, 1, 8, generator=generator).chunk(tp)[rank]
    probs, _ = gate(tokens)
    (probs.sum() * 0).backward()  # only the auxiliary loss is left
    if tp > 1:
        dist.all_reduce(gate.weight.grad)  # as finalize_model_grads does with sequence parallelism
    if rank == 0:
        print(f"tp {tp}: |gradient of the router| {gate.weight.grad.norm():.6f}")


if __name__ == "__main__":
    for tp in (1, 2):
        mp.spawn(rank, (tp,), nprocs=tp)
