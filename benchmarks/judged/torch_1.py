"""torch 2.13: FSDP2 on a mesh of one rank divides twice by set_gradient_divide_factor in fp16 and fp64.

torchrun --nproc-per-node 1 torch_1.py

foreach_reduce (fsdp/_fully_shard/_fsdp_collectives.py) divides where the group has one rank ("just copy the
input to output"), and again by the pre- and post-factor of _get_gradient_divide_factors, which are not None
unless the reduce dtype is fp32 or bf16. transformers' experts (DistributedConfig(fsdp_size=n, ep_size=n)) and
torchtitan's have such meshes.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1,))
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
    layer = torch.nn.Linear(2, 1, bias=False, dtype=dtype)
    fully_shard(layer, mesh=mesh)
    layer.set_gradient_divide_factor(4.0)
    layer(torch.ones(1, 2, dtype=dtype)).sum().backward()
    print(dtype, "gradient of 1 divided by 4:", layer.weight.grad.to_local()[0, 0].item())
dist.destroy_process_group()
