"""DeepSpeed 0.19.8: with round_robin_gradients, safe_get_full_grad returns the gradient of another parameter.

DS_ACCELERATOR=cpu DS_BUILD_OPS=0 torchrun --nproc-per-node 2 deepspeed_2.py
"""

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

dist.init_process_group("gloo")
deepspeed.ops.__compatible_ops__.clear()  # compile nothing
deepspeed.init_distributed("gloo", auto_mpi_discovery=False)


class Model(torch.nn.Module):
    """The gradient of parameter number i is i + 1 everywhere."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(4, 4)) for _ in range(6)])

    def forward(self):
        return sum((number + 1) * weight.sum() for number, weight in enumerate(self.weights))


for stage in (1, 2):
    for round_robin in (False, True):
        model = Model()
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": stage, "round_robin_gradients": round_robin},
                "zero_allow_untested_optimizer": True,
            },
        )
        engine.backward(engine())
        found = [safe_get_full_grad(weight)[0, 0].item() for weight in model.weights]
        if dist.get_rank() == 0:
            print(f"stage {stage}, round_robin_gradients {round_robin}: gradients {found}")
dist.destroy_process_group()
