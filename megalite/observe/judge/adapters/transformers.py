"""Judge transformers: its causal language models, tensor and expert parallelism, FSDP2 and Trainer.

The model is loaded as users load it, ``from_pretrained(folder, distributed_config=DistributedConfig(...))``,
and trained by the methods of a `Trainer`, in the loop of `Trainer._run_epoch` over microbatches. Layouts:

* ``tp2``: DistributedConfig(tp_size=2); with ``ep2etp1``, the experts are on the same ranks.
* ``dp2``: the Trainer's DistributedDataParallel.
* ``dp2+zero3``: DistributedConfig(fsdp_size=2), FSDP2; with ``ep2``, the experts are on the same ranks.
* ``tp2dp2``: DistributedConfig(tp_size=2, dp_replicate_size=2), FSDP2 that replicates instead of DDP.
* ``dp4shard2+zero3``: DistributedConfig(fsdp_size=2, dp_replicate_size=2), HSDP.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.trainer_pt_utils import nested_gather

from megalite.config import Config
from megalite.frontends.huggingface.families import family_of, hf_config_of, to_hf
from megalite.observe.judge.program import Piece, Program, piece_of, refuse_unmapped, whole_number
from megalite.observe.verify.layouts import Layout
from megalite.utils.errors import UserError


def hf_config(config: Config) -> Any:
    """Return transformers' config of the model, without dropout. Its experts run one after the other.

    Raises:
        UserError: transformers has no such model.
    """
    settings = hf_config_of(config.model) | {"torch_dtype": "float32", "use_cache": False}
    hf = transformers.CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
    for name, value in vars(hf).items():
        if isinstance(value, float) and name.endswith(("dropout", "pdrop")):
            setattr(hf, name, 0.0)
    hf._experts_implementation = "eager"  # the fused GEMMs need sizes that are multiples of 16 bytes
    return hf


def hf_class(config: Config) -> Any:
    """Return transformers' class of the model.

    Raises:
        UserError: transformers has no such model, or it is not a causal language model.
    """
    if not config.model.is_causal:
        raise UserError("transformers' model is judged as a causal language model, which this one is not")
    (name,) = hf_config_of(config.model)["architectures"]
    return getattr(transformers, name)


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return trained parameters and saved buffers by name; tied ones once."""
    saved = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return dict(model.named_parameters()) | buffers


def from_megalite(config: Config, full: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return transformers' tensors by the names and in the shapes of its modules, which stack experts."""
    family = family_of(config.model)
    in_files = {family.full_name(name): each for name, each in to_hf(full, config.model).items()}
    with torch.device("meta"):
        model = hf_class(config)(hf_config(config))
    tensors: dict[str, Tensor] = {}
    for name, expected in saved_tensors(model).items():
        groups = family.names_in_files(name, config.model.num_experts or 1)
        if missing := [part for group in groups for part in group if part not in in_files]:
            raise UserError(f"megalite's model has no tensor for {name}: {missing[0]} is missing")
        parts = [torch.cat([in_files.pop(part) for part in group]) for group in groups]
        tensors[name] = torch.stack(parts) if parts[0].dim() < expected.dim() else parts[0]
        if tensors[name].shape != expected.shape:
            raise UserError(
                f"{name} is {list(expected.shape)} in transformers, {list(tensors[name].shape)} in megalite"
            )
    if in_files:
        raise UserError(f"transformers' model has no tensor for {next(iter(in_files))}")
    return tensors


__all__ = ["LAYOUTS", "PACKAGE", "VERSIONS", "build", "from_megalite"]

PACKAGE = "transformers"
VERSIONS = ("5.23.0",)
LAYOUTS = ("tp2", "dp2", "dp2+zero3", "mbs1", "tp2dp2", "tp2dp2+zero3")

transformers.utils.logging.disable_progress_bar()
_OPTIONS = {
    "masked-token": "labels with this token have no loss",
    "experts": "experts_implementation: eager, batched_mm or grouped_mm",
    "attention": "attn_implementation: eager or sdpa",
    "ep": "ep_implementation: auto, all_to_all or all_reduce",
    "loss-kwargs": "no: each microbatch has a mean loss, as with a model without num_items_in_batch",
}
"""Names that --set takes, and their meanings."""


class TransformersRun(Program):
    """Trainer of transformers with a causal language model."""

    def __init__(self, layout: Layout, config: Config, options: Mapping[str, str]) -> None:
        _refuse_unknown(layout, config, options)
        self._tp, dp = layout.size("tp"), layout.size("dp")
        self._dp, self._batch = dp, layout.mbs or config.training.micro_batch_size
        masked = options.get("masked-token")
        self._masked = None if masked is None else whole_number("masked-token", masked)
        self._folder = tempfile.TemporaryDirectory(prefix="judge-transformers-")
        model = _load_model(layout, config, options)
        arguments = _arguments(config, self._folder.name, self._num_microbatches(config), self._batch)
        # accelerate refuses a mesh on CPUs, and runs the same code for them as for GPUs.
        with patch.object(ParallelismConfig, "_validate_accelerator"):
            self._trainer: Any = transformers.Trainer(model=model, args=arguments)
        if options.get("loss-kwargs") == "no":
            self._trainer.model_accepts_loss_kwargs = False
        self._model, _ = self._trainer._prepare_for_training(1 << 20, None, None)
        self._model.zero_grad()

    def _num_microbatches(self, config: Config) -> int:
        samples = self._batch * self._dp
        count, rest = divmod(config.global_batch(self._dp), samples)
        if rest or not count:
            raise UserError(
                f"--global-batch-size {config.global_batch(self._dp)} is not a multiple of {samples}: "
                "--micro-batch-size times the data-parallel ranks"
            )
        return count

    def weights(self) -> Mapping[str, Piece]:
        return {name: piece_of(each.detach()) for name, each in saved_tensors(self._trainer.model).items()}

    def backward(self, samples: Tensor) -> Mapping[str, float]:
        trainer = self._trainer
        batches = list(self._microbatches(samples))
        # The rest is the body of Trainer._run_epoch's loop over one update.
        num_items = trainer._get_num_items_in_batch(batches, trainer.args.device)
        trainer.current_gradient_accumulation_steps = len(batches)
        loss = torch.zeros(())
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            trainer.accelerator.gradient_state._set_sync_gradients(is_last)
            with nullcontext() if is_last else self._without_reduction():
                loss = loss + trainer.training_step(self._model, batch, num_items)
        mean = nested_gather(loss, trainer.args.parallel_mode).mean()  # as in _maybe_log_save_evaluate
        return {"loss": float(mean)}

    def _without_reduction(self) -> AbstractContextManager[Any]:
        """Return the context in which the Trainer runs all microbatches but the last."""
        trainer = self._trainer
        if trainer.is_distributed_loading_by_transformers and getattr(
            trainer.model, "_is_fsdp_managed_module", False
        ):
            return trainer._defer_fsdp_gradient_reduction()
        return trainer.accelerator.no_sync(model=self._model)

    def _microbatches(self, samples: Tensor) -> Iterator[dict[str, Tensor]]:
        """Yield this rank's microbatches. As with accelerate's sampler, each goes to the next rank."""
        rank = dist.get_rank() // self._tp
        for tokens in samples.split(self._batch)[rank :: self._dp]:
            labels = tokens[:, 1:].clone()
            if self._masked is not None:
                labels[labels == self._masked] = -100
            yield {"input_ids": tokens[:, :-1].clone(), "labels": labels, "shift_labels": labels}

    def gradients(self) -> Mapping[str, Piece]:
        return {
            name: piece_of(torch.zeros_like(each).detach() if each.grad is None else each.grad)
            for name, each in self._trainer.model.named_parameters()
        }

    def update(self) -> Mapping[str, float]:
        trainer = self._trainer
        norm = trainer._clip_grad_norm(self._model) if trainer.args.max_grad_norm > 0 else None
        norm = trainer._get_grad_norm(self._model, grad_norm=norm)
        trainer.optimizer.step()
        rate = trainer._get_learning_rate()
        trainer.lr_scheduler.step()
        self._model.zero_grad()
        trainer.state.global_step += 1
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        return {"gradient norm": float(norm), "learning rate": rate}

    def modules(self) -> Mapping[str, torch.nn.Module]:
        return {name: module for name, module in self._trainer.model.named_modules() if name}

    def save(self, folder: Path) -> None:
        if self._trainer.is_distributed_loading_by_transformers:
            raise UserError("the Trainer of transformers cannot resume with a DistributedConfig")
        self._trainer.args.output_dir = str(folder)
        self._trainer._save_checkpoint(self._model, None)
        dist.barrier()

    def resume(self, folder: Path) -> None:
        if self._trainer.is_distributed_loading_by_transformers:
            raise UserError("the Trainer of transformers cannot resume with a DistributedConfig")
        (checkpoint,) = folder.glob("checkpoint-*")
        self._trainer._load_from_checkpoint(str(checkpoint))
        self._trainer._load_optimizer_and_scheduler(str(checkpoint))

    def close(self) -> None:
        for state in (GradientState, AcceleratorState, PartialState):
            state._reset_state()  # singletons, which would outlive the layout
        self._folder.cleanup()


def build(layout: Layout, config: Config, options: Mapping[str, str]) -> Program:
    """Return the Trainer of this rank."""
    return TransformersRun(layout, config, options)


def _refuse_unknown(layout: Layout, config: Config, options: Mapping[str, str]) -> None:
    """Raise `UserError` for what transformers cannot do here, or this adapter does not map."""
    if unknown := sorted(set(layout.sizes) - {"tp", "dp", "ep", "etp"}):
        raise UserError(f"layout {layout}: transformers trains without {unknown[0]}")
    if layout.v is not None or layout.schedule is not None:
        raise UserError(f"layout {layout}: transformers trains without pipelines")
    if unknown := [switch for switch in layout.switches if switch != "zero3"]:
        raise UserError(f"layout {layout}: transformers has no +{unknown[0]}; +zero3 is its FSDP2")
    has_fsdp, ep = "zero3" in layout.switches, layout.size("ep")
    if layout.shard is not None and not has_fsdp:
        raise UserError(f"layout {layout}: shard{layout.shard} needs +zero3, FSDP2")
    if ep > 1 and layout.size("dp") > 1 and not has_fsdp:
        raise UserError(f"layout {layout}: transformers' experts need FSDP2 over dp: add +zero3")
    if ep > 1 and layout.size("tp") > 1 and layout.sizes.get("etp") != 1:
        raise UserError(f"layout {layout}: transformers cuts no expert of ep over tp: add etp1")
    if ep == 1 and "etp" in layout.sizes:
        raise UserError(f"layout {layout}: transformers cuts experts over all tp ranks: remove etp")
    refuse_unmapped(config, PACKAGE)
    if unknown := sorted(set(options) - set(_OPTIONS)):
        meanings = "; ".join(f"{name}: {meaning}" for name, meaning in _OPTIONS.items())
        raise UserError(f"--set {unknown[0]} is not known. {meanings}")


def _load_model(layout: Layout, config: Config, options: Mapping[str, str]) -> Any:
    """Return the model as `from_pretrained` cuts it, from a folder that rank 0 writes."""
    is_first = dist.get_rank() == 0
    folder = [tempfile.mkdtemp(prefix="judge-weights-") if is_first else ""]
    kind, hf = hf_class(config), hf_config(config)
    hf._experts_implementation = options.get("experts", hf._experts_implementation)
    torch.manual_seed(config.training.seed)
    if is_first:
        kind(hf).save_pretrained(folder[0])
    dist.broadcast_object_list(folder, src=0)
    sizes = _sizes(layout)
    more: dict[str, Any] = {"experts_implementation": hf._experts_implementation}
    if "attention" in options:
        more["attn_implementation"] = options["attention"]
    if sizes:
        more["distributed_config"] = DistributedConfig(**sizes, ep_implementation=options.get("ep", "auto"))
    try:
        model = kind.from_pretrained(folder[0], dtype=torch.float32, local_files_only=True, **more)
    except ValueError as error:
        raise UserError(f"layout {layout}: transformers refuses it: {error}") from error
    dist.barrier()
    if is_first:
        shutil.rmtree(folder[0])
    return model


def _sizes(layout: Layout) -> dict[str, Any]:
    """Return the sizes of DistributedConfig; none if the Trainer's DDP, or no parallelism, does it."""
    tp, dp, ep = layout.size("tp"), layout.size("dp"), layout.size("ep")
    shard = (layout.shard or dp) if "zero3" in layout.switches else 1
    if tp == 1 and shard == 1:
        return {}
    sizes = {"tp_size": tp, "fsdp_size": shard, "dp_replicate_size": dp // shard, "ep_size": ep}
    return {name: size for name, size in sizes.items() if size > 1}


def _arguments(config: Config, folder: str, num_microbatches: int, batch: int) -> Any:
    """Return the Trainer's arguments."""
    optimizer = config.optimizer
    return transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=num_microbatches,
        max_steps=1 << 20,
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant",
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_epsilon=optimizer.adam_eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=config.optimizer.clip_grad,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
