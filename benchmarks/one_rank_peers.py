"""The same training of the same model on one rank, in megalite and in others, each as a work to be timed.

All of them begin with megalite's initial weights, take the same samples, clip by the global norm and update
with AdamW. In bf16 megalite and megatron-core have weights in bf16 and main weights in fp32; the others
compute under autocast, with weights in fp32.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from plain_gpt import PlainGPT, mean_loss
from torch import Tensor, nn
from turns import LeftOutError, Work

from megalite.config import Config, ModelConfig
from megalite.data.batch_loader import microbatch_samples
from megalite.distributed.topology import Topology
from megalite.frontends.huggingface.families import hf_config_of, to_hf
from megalite.train.model_chunks import build_chunks, named_parameters
from megalite.train.run_context import build_data, resolve_run
from megalite.train.trainer import start_trainer

LossOf = Callable[[Tensor, Tensor], Tensor]
"""Tokens and labels, ``[b, s]`` each, to the mean of the tokens' losses."""
Update = Callable[[], None]
"""Clips the gradients, updates the weights, and forgets the gradients."""


def megalite(config: Config, topology: Topology) -> Work:
    """Return megalite's own training step."""
    trainer = start_trainer(config, topology)
    num_parameters = sum(parameter.numel() for _, parameter in named_parameters(trainer.chunks))
    return Work(lambda: trainer.step().loss, num_parameters)


def plain(config: Config, topology: Topology) -> Work:
    """Return a step with PyTorch's own modules, as a careful user writes it."""
    network = _plain_network(config, topology)
    return training(_plain_loss(network, config, topology), network, config, topology)


def compiled(config: Config, topology: Topology) -> Work:
    """Return the same, model and loss under torch.compile."""
    network = _plain_network(config, topology)
    whole = torch.compile(_plain_loss(network, config, topology))
    return training(whole, network, config, topology)


def transformers(config: Config, topology: Topology) -> Work:
    """Hugging Face's model of the family, with scaled_dot_product_attention."""
    if config.model.has_experts:
        raise LeftOutError("its experts have other names in memory than in its files")
    with packages("transformers"):
        from transformers import AutoConfig, AutoModelForCausalLM
    theirs = hf_config_of(config.model) | {"torch_dtype": "float32"}
    if theirs.get("activation_function") == "gelu_new":
        theirs["activation_function"] = "gelu_pytorch_tanh"  # the same formula in one operator
    hf = AutoConfig.for_model(theirs.pop("model_type"), **theirs)
    with topology.device:
        network = AutoModelForCausalLM.from_config(hf, attn_implementation="sdpa")
    problems = network.load_state_dict(to_hf(initial_weights(config, topology), config.model), strict=False)
    assert not problems.unexpected_keys, problems
    network.train()
    loss = _autocast(
        lambda tokens, labels: mean_loss(network(tokens, use_cache=False).logits, labels), config, topology
    )
    return training(loss, network, config, topology)


def as_others_run(config: Config) -> Config:
    """Return the config without megalite's allocator settings: the other programs use glibc's defaults."""
    return replace(config, parallel=replace(config.parallel, keep_freed_memory=False))


@contextmanager
def packages(name: str) -> Iterator[None]:
    """Import a peer without the scripts of this folder, such as kernels.py: packages have their names.

    Raises:
        LeftOutError: it does not import.
    """
    folder, before = Path(__file__).resolve().parent, list(sys.path)
    sys.path[:] = [path for path in before if Path(path or ".").resolve() != folder]
    try:
        yield
    except ImportError as error:
        raise LeftOutError(f"{name} does not import: {error}") from None
    finally:
        sys.path[:] = before


def is_plain(model: ModelConfig) -> bool:
    """Return whether `PlainGPT` is this model: it is GPT-2, without other positions, norms or activations."""
    return (
        model.position_embedding_type == "learned_absolute"
        and model.normalization == "LayerNorm"
        and model.activation == "gelu"
        and model.add_bias_linear
        and not model.embed_layernorm
        and model.num_query_groups is None
    )


def _plain_network(config: Config, topology: Topology) -> PlainGPT:
    if not is_plain(config.model):
        raise LeftOutError("benchmarks/plain_gpt.py is GPT-2, and this is another model")
    with topology.device:  # a CPU needs half a minute to initialize a billion weights
        network = PlainGPT(config.model)
    network.load(initial_weights(config, topology))
    return network


def _plain_loss(network: PlainGPT, config: Config, topology: Topology) -> LossOf:
    return _autocast(lambda tokens, labels: mean_loss(network(tokens), labels), config, topology)


def _autocast(loss: LossOf, config: Config, topology: Topology) -> LossOf:
    if config.model.params_dtype != "bf16":
        return loss
    wrapped: LossOf = torch.autocast(topology.device.type, torch.bfloat16)(loss)
    return wrapped


def initial_weights(config: Config, topology: Topology) -> dict[str, Tensor]:
    """Return all of megalite's weights by name, in fp32: they depend on the seed alone."""
    chunks = build_chunks(config, topology)
    return {name: weight.detach().float() for name, weight in named_parameters(chunks)}


def samples(config: Config, topology: Topology) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield the microbatches of each step, those that megalite's takes."""
    dataset = build_data(resolve_run(config, topology)).train
    assert dataset is not None
    size, consumed = config.training.micro_batch_size, 0
    while True:
        microbatches = []
        for index in range(config.num_microbatches(1)):
            numbers = microbatch_samples(consumed, index, size, 0, 1)
            text = torch.stack([torch.from_numpy(dataset[int(number)]) for number in numbers])
            text = text.to(topology.device, torch.int64)
            microbatches.append((text[:, :-1].contiguous(), text[:, 1:].contiguous()))
        consumed += size * len(microbatches)
        yield microbatches


def training(
    loss_of: LossOf,
    network: nn.Module,
    config: Config,
    topology: Topology,
    make_update: Callable[[Sequence[nn.Parameter], Config], Update] | None = None,
) -> Work:
    """Return a training step around a function of the loss: sums over microbatches, clipping, update."""
    parameters = list(network.parameters())
    update = (make_update or adamw)(parameters, config)
    batches = samples(config, topology)

    def step() -> float:
        microbatches = next(batches)
        total = torch.zeros((), device=topology.device)
        for tokens, labels in microbatches:
            loss = loss_of(tokens, labels) / len(microbatches)
            loss.backward()
            total += loss.detach()
        update()
        return total.item()

    return Work(step, sum(parameter.numel() for parameter in parameters))


def adamw(parameters: Sequence[nn.Parameter], config: Config) -> Update:
    """PyTorch's fused AdamW on the parameters themselves; biases and norms are not decayed."""
    optimizer, max_norm = _optimizer(parameters, config), config.optimizer.clip_grad or math.inf

    def update() -> None:
        nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
        optimizer.zero_grad()

    return update


def adamw_on_main_weights(parameters: Sequence[nn.Parameter], config: Config) -> Update:
    """Return the same on fp32 copies of parameters in 16 bits."""
    mains = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    update_mains = adamw(mains, config)

    @torch.no_grad()
    def update() -> None:
        for parameter, main in zip(parameters, mains, strict=True):
            assert parameter.grad is not None
            main.grad, parameter.grad = parameter.grad.float(), None
        update_mains()
        for parameter, main in zip(parameters, mains, strict=True):
            parameter.copy_(main)

    return update


def _optimizer(parameters: Sequence[nn.Parameter], config: Config) -> torch.optim.Optimizer:
    settings = config.optimizer
    groups = [
        {"params": [each for each in parameters if (each.dim() > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, settings.weight_decay), (False, 0.0))
    ]
    betas = (settings.adam_beta1, settings.adam_beta2)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.adam_eps, fused=True)
