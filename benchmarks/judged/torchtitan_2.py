"""Gradient of an MoE router of torchtitan 0.2.2 under tensor parallelism (CPU, gloo): 1 rank, then 2.

python torchtitan_2.py; torchrun --nproc-per-node 2 torchtitan_2.py
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.utils import get_train_context
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, DeepSeekV3ModelArgs, parallelize_deepseekv3
from torchtitan.models.moe import MoEArgs

parallel_dims.device_type = "cpu"
histc = torch.histc  # has no kernel for integers on CPU
torch.histc = lambda x, **kwargs: histc(x.float(), **kwargs).to(x.dtype)
for name, value in {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29511",
}.items():
    os.environ.setdefault(name, value)
dist.init_process_group("gloo")
experts = MoEArgs(num_experts=4, top_k=2, score_before_experts=False, use_grouped_mm=False, route_norm=True)
sizes = dict(q_lora_rank=0, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
args = DeepSeekV3ModelArgs(
    vocab_size=128,
    dim=32,
    inter_dim=64,
    moe_inter_dim=64,
    n_layers=1,
    n_heads=4,
    n_dense_layers=0,
    max_seq_len=16,
    moe_args=experts,
    **sizes,
)
args.moe_impl = "standard"
full = {}
for name, parameter in DeepSeekV3Model(args).named_parameters():  # the same weights in both runs
    values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(full)))
    full[name] = values / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else torch.ones_like(values)
model = DeepSeekV3Model(args)
with torch.no_grad():
    model.init_weights(buffer_device=torch.device("cpu"))
job = JobConfig()
job.training.seq_len, job.activation_checkpoint.mode = 16, "none"
size = dist.get_world_size()
if size > 1:
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=size, pp=1, ep=1, etp=1, world_size=size)
    model = parallelize_deepseekv3(model, dims, job)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            parameter.copy_(distribute_tensor(full[name], parameter.device_mesh, parameter.placements))
        else:
            parameter.copy_(full[name])
tokens = torch.randint(128, (4, 17), generator=torch.Generator().manual_seed(0))
with get_train_context(size > 1)():
    logits = model(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
gradient = model.layers["0"].moe.router.gate.weight.grad
placements = getattr(gradient, "placements", None)
local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
print(
    f"rank {dist.get_rank()} of {size}: router gradient {local.norm():.6f} {local[0, :3].tolist()} {placements}"
)
dist.destroy_process_group()
