"""vocab_parallel_cross_entropy with label smoothing depends on the tensor-parallel size (megatron-core 0.16.1)."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def start(rank, size, **sizes):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29541", CUDA_DEVICE_MAX_CONNECTIONS="1")
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.cuda.current_device = lambda: "cpu"
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(**sizes)


def rank(rank):
    start(rank, 2, tensor_model_parallel_size=2)
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits, target = torch.tensor([[[0.0, 1.0, 2.0, 3.0]]]), torch.tensor([[3]])
    part = logits[..., 2 * rank : 2 * rank + 2].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(part, target, 0.2)
    loss.sum().backward()
    smooth = 0.2 * 4 / 3  # Megatron's form: (1 - s) CE - s mean(log p), with s = eps K / (K - 1)
    logp = logits.log_softmax(-1)[0, 0]
    right = -(1 - smooth) * logp[3] - smooth * logp.mean()
    print(
        f"rank {rank}: loss {loss.item():.6f}, of one rank {right:.6f}; gradient {part.grad.flatten().tolist()}"
    )


if __name__ == "__main__":
    mp.spawn(rank, nprocs=2)
