"""Forward passes that a pipeline stage of torch 2.13 runs for one step (CPU, gloo).

torchrun --nproc-per-node 2 torchtitan_3.py
"""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class Counting(torch.nn.Module):
    """Layer with a buffer that counts tokens, as tokens_per_expert of torchtitan's MoE does."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("tokens", torch.zeros(()))

    def forward(self, x):
        self.tokens += x.shape[0]
        return self.layer(x)


dist.init_process_group("gloo")
rank = dist.get_rank()
model = Counting()
stage = PipelineStage(model, rank, 2, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
x = torch.randn(8, 4)
for step in (1, 2):
    model.tokens.zero_()
    schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == 1 else {}))
    print(f"stage {rank}, step {step}: {int(model.tokens)} tokens of a batch of 8", flush=True)
dist.destroy_process_group()
