"""DeepSpeed 0.19.8: with Ulysses, gradients of stages 0 to 2 are sequence_parallel_size times too large.

DS_ACCELERATOR=cpu DS_BUILD_OPS=0 torchrun --nproc-per-node 2 deepspeed_3.py

The loop is that of DeepSpeed's guide (docs/_tutorials/ulysses-alst-sequence-parallelism.md). The backward pass of the
differentiable all_gather of the losses sums over the group, so that a rank's gradient is the group's size times its
share. Stage 3 averages over all ranks, which is right; stages 0 to 2 divide by the ranks / sequence_parallel_size.
"""

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from deepspeed.utils import safe_get_full_grad
from transformers import LlamaConfig, LlamaForCausalLM

deepspeed.ops.__compatible_ops__.clear()  # compile nothing
vars(deepspeed.comm.torch)["build_shm_op"] = lambda: None
deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
torch.manual_seed(0)
SIZES = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 32}
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, attn_implementation="sdpa", **SIZES))
tokens = torch.randint(32, (1, 8))
model(input_ids=tokens, labels=tokens).loss.backward()
expected = model.model.embed_tokens.weight.grad.clone()
mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, 1)
group = mpu.get_sequence_parallel_group()
start = {name: each.clone() for name, each in model.state_dict().items()}
for stage in (0, 1, 2, 3):
    sharded = LlamaForCausalLM(model.config)
    sharded.load_state_dict(start)
    engine, *_ = deepspeed.initialize(
        model=sharded,
        optimizer=torch.optim.AdamW(sharded.parameters(), lr=1e-3),
        mpu=mpu,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(8)[None]}
    batch = next(UlyssesSPDataLoaderAdapter([batch], mpu.get_sequence_parallel_rank(), group, 2, "cpu"))
    labels = batch["shift_labels"]
    loss = engine.module.loss_function(engine(**batch).logits, None, 32, shift_labels=labels)
    losses = collectives.all_gather(loss, group=group)
    counts = collectives.all_gather((labels != -100).sum(), group=group)
    engine.backward((torch.stack(losses) * torch.stack(counts)).sum() / sum(counts))
    found = safe_get_full_grad(engine.module.model.embed_tokens.weight)
    if dist.get_rank() == 0:
        print(
            f"stage {stage}: {float((found * expected).sum() / expected.square().sum()):.4f} times the gradient"
        )
dist.destroy_process_group()
