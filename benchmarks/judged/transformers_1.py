"""transformers 5.23: with tensor parallelism, q_norm's gradient grows with each accumulated microbatch.

torchrun --nproc-per-node 2 transformers_1.py

ReplicatedWithGradAllReduce (distributed/tensor_parallel.py) all-reduces `param.grad` after each backward. With
gradient accumulation `param.grad` also holds the microbatches before, which have been summed over the ranks
already: they are summed again. Microbatch j of n gets the factor tp ** (n - j).
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

dist.init_process_group("gloo")
folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
config = Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=32,
    attention_dropout=0.0,
)
torch.manual_seed(0)
if dist.get_rank() == 0:
    Qwen3ForCausalLM(config).save_pretrained(folder[0])
dist.broadcast_object_list(folder, src=0)
plain = Qwen3ForCausalLM.from_pretrained(folder[0], dtype=torch.float32)
tp2 = Qwen3ForCausalLM.from_pretrained(
    folder[0], dtype=torch.float32, distributed_config=DistributedConfig(tp_size=2)
)
tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))
for num_microbatches in (1, 2, 4):
    gradients = {}
    for name, model in (("one rank", plain), ("tp 2", tp2)):
        model.zero_grad()
        for batch in tokens.chunk(num_microbatches):
            (model(input_ids=batch, labels=batch).loss / num_microbatches).backward()
        attention = model.model.layers[0].self_attn
        gradients[name] = {
            "q_norm": attention.q_norm.weight.grad.clone(),
            "input_layernorm": model.model.layers[0].input_layernorm.weight.grad.clone(),
        }
    if dist.get_rank() == 0:
        for name, right in gradients["one rank"].items():
            wrong = gradients["tp 2"][name]
            relative = float((wrong - right).norm() / right.norm())
            print(
                f"{num_microbatches} microbatches: {name}: norm {float(right.norm()):.5f} on one rank, "
                f"{float(wrong.norm()):.5f} with tp 2, relative difference {relative:.1e}"
            )
dist.destroy_process_group()
