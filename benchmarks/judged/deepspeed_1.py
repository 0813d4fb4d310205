"""DeepSpeed 0.19.8: stage 0 in bf16 makes an optimizer step with zero gradients before training.

DS_ACCELERATOR=cpu DS_BUILD_OPS=0 python deepspeed_1.py

FP16_UnfusedOptimizer.initialize_optimizer_states (runtime/fp16/unfused_optimizer.py) calls optimizer.step() with
zero gradients to allocate the states, and leaves the states as they are. AdamW has then counted a step, so its
bias correction is that of step 2: the first update is 0.744 times the learning rate instead of 1.0 times, and the
weights were decayed once more. ZeRO 1 to 3, and stage 0 in fp32, begin with step 1.
"""

import os

os.environ |= {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29612",
}
import deepspeed
import torch

deepspeed.ops.__compatible_ops__.clear()  # compile nothing
deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
LR, DECAY = 0.0625, 0.5
for stage in (0, 1, 2, 3):
    layer = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.ones_(layer.weight)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=LR, weight_decay=0.0)
    other = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.ones_(other.weight)
    decaying = torch.optim.AdamW(other.parameters(), lr=LR, weight_decay=DECAY)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=layer, optimizer=optimizer, config=config)
    loss = engine(torch.ones(1, 4, dtype=torch.bfloat16)).float().sum()
    engine.backward(loss)
    engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        update = 1.0 - engine.module.weight.float()[0, 0].item()
    kind = type(engine.optimizer).__name__
    second, *_ = deepspeed.initialize(model=other, optimizer=decaying, config=config)
    second.backward(second(torch.ones(1, 4, dtype=torch.bfloat16)).float().sum())
    second.step()
    with deepspeed.zero.GatheredParameters(list(second.module.parameters())):
        weight = second.module.weight.float()[0, 0].item()
    print(
        f"stage {stage} ({kind}): first update {update / LR:.3f} times the learning rate; with weight decay "
        f"{DECAY} the weight becomes {weight:.4f}, and {1 - LR * DECAY - LR:.4f} is right"
    )
