"""Gradient of the last norm in torchtitan 0.3.0's Trainer with a schedule that splits backward (CPU, gloo).

python torchtitan_4.py; torchrun --nproc-per-node 2 torchtitan_4.py Interleaved1F1B; ... ZBVZeroBubble
torchrun --nproc-per-node 2 torchtitan_4.py ZBVZeroBubble whole: with the loss of all positions at once
"""

import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.attention import flex_attention
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.distributed import parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import config_registry
from torchtitan.tools import utils
from torchtitan.trainer import Trainer

for module in (utils, parallel_dims, dist_utils):  # torchtitan never chooses the CPU by itself
    module.device_type, module.device_module = "cpu", torch.cpu
torch.compiler.set_stance("force_eager")


def attend(q, k, v, *, block_mask, scale, **options):  # flex attention has no gradient on CPU
    seen = flex_attention.create_mask(block_mask.mask_mod, len(q), 1, q.shape[2], k.shape[2], "cpu")
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale), None


FlexAttention.compiled_flex_attn = staticmethod(attend)
os.environ["LOCAL_RANK"] = "0"
one = {} if "RANK" in os.environ else {"rank": 0, "world_size": 1, "store": dist.HashStore()}
dist.init_process_group("gloo", **one)
config = config_registry.llama3_debugmodel()  # 6 layers, its loss in 8 chunks
config.training.seq_len, config.training.local_batch_size, config.training.max_norm = 16, 4, 1e9
config.training.disable_cuda_graphs, config.training.mixed_precision_param = True, "float32"
config.activation_checkpoint = None
config.parallelism.pipeline_parallel_degree = dist.get_world_size()
if len(sys.argv) > 1:
    config.parallelism.pipeline_parallel_schedule = sys.argv[1]
if "whole" in sys.argv:
    config.loss = CrossEntropyLoss.Config(global_vocab_size=2048)
logged = lambda step, *args, **more: print(f"rank {dist.get_rank()} loss {args[0]:.6f}, norm {args[2]:.6f}")
stats = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
metrics = SimpleNamespace(color=utils.NoColor(), device_name="cpu", log=logged, should_log=lambda step: True)
metrics.device_memory_monitor = SimpleNamespace(device_name="cpu", get_peak_stats=lambda: stats)
metrics.ntokens_since_last_log, metrics.data_loading_times = 0, []
config.metrics = SimpleNamespace(build=lambda **_: metrics)
config.dataloader = config.tokenizer = SimpleNamespace(build=lambda **_: None)
trainer = Trainer(config)
for part in trainer.model_parts:  # the same weights in all layouts
    for name, parameter in part.named_parameters():
        local = getattr(parameter, "_local_tensor", parameter)
        values = torch.linspace(-1, 1, local.numel()).view(local.shape) ** 3 * 0.1
        local.data.copy_(values + ("norm" in name))
samples = torch.randint(2048, (4, 17), generator=torch.Generator().manual_seed(0))
batches = samples.split(1 if dist.get_world_size() > 1 else 4)
positions = torch.arange(16).repeat(len(batches[0]), 1)
trainer.train_step(iter([({"input": x[:, :-1], "positions": positions}, x[:, 1:]) for x in batches]))
for part in trainer.model_parts:
    for name, parameter in part.named_parameters():
        if name in ("norm.weight", "lm_head.weight"):
            norm = parameter.grad is not None and parameter.grad.full_tensor().norm().item()
            print(f"rank {dist.get_rank()} {name}: gradient's norm {norm}", flush=True)
dist.destroy_process_group()
