"""Gradient norm of torchtitan 0.2.2's Trainer for the same batch in several layouts (CPU, gloo).

python torchtitan_1.py; torchrun --nproc-per-node 2 torchtitan_1.py fsdp; ... pp; ... ddp; ... tp
"""

import os
import sys

import torch
import torch.distributed as dist
from torchtitan import train
from torchtitan.config import JobConfig
from torchtitan.distributed import parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.tools import utils

for module in (utils, parallel_dims, dist_utils):  # torchtitan never chooses the CPU by itself
    module.device_type, module.device_module = "cpu", torch.cpu


class Metrics:
    color, device_name, ntokens_since_last_log, data_loading_times = utils.NoColor(), "cpu", 0, []
    device_memory_monitor = property(lambda self: self)
    get_peak_stats = lambda self: type("Stats", (), {"max_reserved_gib": 0.0, "max_reserved_pct": 0.0})
    should_log = lambda self, step: True

    def log(self, step, loss, max_loss, grad_norm, extra_metrics):
        print(f"rank {dist.get_rank()} loss {loss:.6f} grad_norm {grad_norm:.6f}", flush=True)


layout = sys.argv[1] if len(sys.argv) > 1 else "one"
os.environ.setdefault("LOCAL_RANK", "0")
for name, value in {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29511",
}.items():
    os.environ.setdefault(name, value)
dist.init_process_group("gloo")
size = dist.get_world_size()
job = JobConfig()
job.training.seq_len, job.training.global_batch_size, job.training.mixed_precision_param = 16, 8, "float32"
job.training.local_batch_size = 8 if layout == "pp" else 2
job.training.max_norm = 1e9
job.activation_checkpoint.mode = "none"
job.parallelism.data_parallel_shard_degree = 1
axes = {"fsdp": "data_parallel_shard", "ddp": "data_parallel_replicate", "pp": "pipeline_parallel"}
setattr(job.parallelism, f"{axes.get(layout, 'tensor_parallel')}_degree", size)
spec = get_train_spec()
spec.model_args = {
    "tiny": TransformerModelArgs(dim=32, n_layers=2, n_heads=4, vocab_size=128, multiple_of=32)
}
spec.build_tokenizer_fn = spec.build_dataloader_fn = None
spec.build_metrics_processor_fn = lambda *args: Metrics()
register_train_spec("tiny", spec)
job.model.name, job.model.flavor = "tiny", "tiny"
trainer = train.Trainer(job)
for part in trainer.model_parts:  # the same weights in all layouts
    for parameter in part.parameters():
        torch.nn.init.constant_(parameter, 0.02) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)
samples = torch.randint(128, (8, 17), generator=torch.Generator().manual_seed(0))
if layout in ("fsdp", "ddp"):
    samples = samples.chunk(size)[dist.get_rank()]
batches = samples.split(job.training.local_batch_size)
trainer.train_step(trainer.batch_generator([({"input": x[:, :-1]}, x[:, 1:]) for x in batches]))
dist.destroy_process_group()
