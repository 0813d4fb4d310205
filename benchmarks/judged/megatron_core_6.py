"""GatedDeltaNet.out_norm: each tensor-parallel rank has the gradient of its own heads, and nothing sums it (0.16.1)."""

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


def rank(rank, tp):
    start(rank, tp, tensor_model_parallel_size=tp)
    torch.compiler.set_stance("force_eager").__enter__()
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm import gated_delta_net as gdn
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    gdn.HAVE_FLA, gdn.l2norm = True, lambda x: torch.nn.functional.normalize(x, dim=-1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        add_bias_linear=False,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
        perform_initialization=False,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        deterministic_mode=True,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
    )
    parts = gdn.GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear)
    layer = gdn.GatedDeltaNet(config, parts, 1, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    generator = torch.Generator().manual_seed(0)
    full = {
        n: torch.randn(2, *(s // 2 for s in p.shape[:1]), *p.shape[1:], generator=generator)
        for n, p in gdn_one(layer, tp)
    }
    for n, p in layer.named_parameters():
        whole = full[n].flatten(0, 1)
        if p.shape != whole.shape:
            p.data = (full[n][rank] if n != "out_proj.weight" else whole[:, 4 * rank : 4 * rank + 4]).clone()
        else:
            p.data = whole.clone()
    layer.out_norm.weight.data.fill_(1.0)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), layer)
    model.zero_grad_buffer()
    model(torch.randn(4, 1, 8, generator=torch.Generator().manual_seed(1)), None)[0].square().sum().backward()
    finalize_model_grads([model])
    print(f"tp {tp}, rank {rank}: gradient of out_norm {layer.out_norm.weight.main_grad.tolist()}")


def gdn_one(layer, tp):
    for n, p in layer.named_parameters():
        cut = "out_norm" not in n
        shape = list(p.shape)
        if cut:
            shape[1 if n == "out_proj.weight" else 0] *= tp
        yield n, torch.empty(shape)


if __name__ == "__main__":
    mp.spawn(rank, (2,), nprocs=2)
