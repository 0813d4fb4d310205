"""Judge DeepSpeed: ZeRO 0 to 3 and AutoTP, with a causal language model of transformers.

The loop is that of DeepSpeed's guide, with the mean loss of each microbatch: ``loss = engine(...).loss``,
``engine.backward(loss)`` and ``engine.step()``. Layouts:

* ``dp2`` to ``dp2+zero3``: the ZeRO stage.
* ``tp2``: AutoTP, by ``tensor_parallel.autotp_size``.
* ``cp2``: Ulysses, with the loader of DeepSpeed's guide and the loss of transformers' Trainer.

``--set NAME=JSON`` is a setting of its configuration, with dots: ``zero_optimization.overlap_comm=true``.
"""

from __future__ import annotations

import copy
import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported; gloo has no other device

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import config as settings_of
from deepspeed.runtime import engine as engines
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.utils import groups, safe_get_full_grad
from torch import Tensor, nn
from transformers.integrations.deepspeed import deepspeed_sp_compute_loss
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megalite.config import Config
from megalite.observe.judge.adapters.transformers import from_megalite, hf_class, hf_config, saved_tensors
from megalite.observe.judge.program import Piece, Program, refuse_unmapped
from megalite.observe.verify.layouts import Layout
from megalite.utils.errors import UserError

__all__ = ["LAYOUTS", "PACKAGE", "VERSIONS", "build", "from_megalite"]

PACKAGE = "deepspeed"
VERSIONS = ("0.19.8",)
LAYOUTS = ("mbs1", "dp2", "dp2+zero1", "dp2+zero2", "dp2+zero3", "tp2", "cp2", "cp2+zero3")

_DTYPES = [*get_accelerator().supported_dtypes(), torch.float64]
get_accelerator().supported_dtypes = lambda: _DTYPES  # its list for CPUs has no fp64
type(get_accelerator()).FloatTensor = property(lambda self: torch.tensor)  # of the default dtype, also fp64
vars(import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None  # compiles one of inference
_NO_GROUPS = {
    name: copy.copy(value)
    for name, value in vars(groups).items()
    if not name.startswith("__") and (value is None or isinstance(value, int | dict))
}
"""The process groups and their sizes that DeepSpeed's module keeps, before any is made."""
_LAYOUT = "judged_layout.txt"
"""File beside a checkpoint with the name of its layout. In another one, DeepSpeed needs a conversion."""
_SWITCHES = ("zero1", "zero2", "zero3")
_NAMES = {value for name, value in vars(settings_of).items() if name.isupper() and isinstance(value, str)}
_ZERO_NAMES = {
    each for name, field in DeepSpeedZeroConfig.model_fields.items() for each in (name, field.alias) if each
}
"""Names of DeepSpeed's configuration, and of its ZeRO stages. It ignores others."""


class DeepSpeedRun(Program):
    """DeepSpeed's engine on one rank."""

    def __init__(self, layout: Layout, config: Config, options: Mapping[str, str]) -> None:
        _refuse_unknown(layout, config)
        self._layout, self._config = layout, config
        self._cp, self._batch = layout.size("cp"), layout.mbs or config.training.micro_batch_size
        self._settings = _settings(layout, config, options)
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        self._sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        # An engine cuts weights that are their own positions, counted from 1, so that 0 is padding. It has no
        # 16 bits, which would round them.
        model = self._model()
        self._groups = self._with_ulysses(model)
        drawn = {name: each.detach().clone() for name, each in saved_tensors(model).items()}
        self._shapes = {name: tuple(each.shape) for name, each in drawn.items()}
        numbered = {
            name: torch.arange(1.0, 1.0 + each.numel()).view(each.shape) for name, each in drawn.items()
        }
        self._start(model, numbered, {**self._settings, "bf16": {}, "fp16": {}})
        self._positions = {
            name: None if _equal(local, numbered[name]) else local.round().long() - 1
            for name, local in self._local_weights()
        }
        self.load(drawn)

    def _model(self) -> nn.Module:
        torch.manual_seed(self._config.training.seed)
        return hf_class(self._config)(hf_config(self._config)).float()

    def _with_ulysses(self, model: nn.Module) -> Any:
        """Let attention exchange heads for positions over cp, and return DeepSpeed's groups for it."""
        try:
            return UlyssesSPAttentionHF.register_with_transformers(
                model,
                core_attn_implementation="sdpa",
                sequence_parallel_size=self._cp,
                micro_batch_size=self._batch,
            )
        except ValueError as error:
            raise UserError(f"layout {self._layout}: DeepSpeed refuses it: {error}") from error

    def _start(self, model: nn.Module, full: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
        """Give weights to a model, and start an engine for it."""
        with torch.no_grad():
            for name, tensor in saved_tensors(model).items():
                tensor.copy_(full[name])
        decayed = [each for each in model.parameters() if each.dim() > 1]
        others = [each for each in model.parameters() if each.dim() <= 1]
        parameters = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        try:
            self._engine, *_ = deepspeed.initialize(
                model=model,
                model_parameters=parameters,
                config=json.loads(json.dumps(settings)),
                mpu=self._groups,
            )
        except ValueError as error:
            raise UserError(f"layout {self._layout}: DeepSpeed refuses it: {error}") from error
        self._engine.train()

    def load(self, full: Mapping[str, Tensor]) -> None:
        self._engine.destroy()
        self._start(self._model(), full, self._settings)

    def _local_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in saved_tensors(self._engine.module).items():
            yield name, (tensor.ds_tensor if hasattr(tensor, "ds_tensor") else tensor).detach()

    def _piece(self, name: str, tensor: Tensor) -> Piece:
        shape = self._shapes[name]
        if tuple(tensor.shape) == shape:  # also the assembled gradient of ZeRO 3
            return Piece.whole(tensor)
        return Piece(tensor, shape, self._positions[name])

    def weights(self) -> Mapping[str, Piece]:
        return {name: self._piece(name, tensor) for name, tensor in self._local_weights()}

    def backward(self, samples: Tensor) -> Mapping[str, float]:
        group = groups._get_data_parallel_group()
        losses = []
        own = samples.split(self._batch)[dist.get_rank(group) :: dist.get_world_size(group)]
        batches = [self._batch_of(tokens) for tokens in own]
        for number, batch in enumerate(batches if self._cp == 1 else self._shared(batches)):
            loss = self._loss(batch)
            self._engine.backward(loss)
            losses.append(loss.detach())
            if number < len(batches) * self._cp - 1:
                self._engine.step()  # only counts, until the last microbatch
        loss = torch.stack(losses).mean()
        dist.all_reduce(loss, group=group)
        return {"loss": float(loss) / dist.get_world_size(group)}

    def _batch_of(self, tokens: Tensor) -> dict[str, Tensor]:
        labels = tokens[:, 1:].contiguous()
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": labels, "shift_labels": labels}

    def _shared(self, batches: Sequence[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Yield this rank's positions of the batches of all ranks of cp, one after the other."""
        positions = torch.arange(self._config.model.seq_length).expand(self._batch, -1).contiguous()
        cut = UlyssesSPDataLoaderAdapter(
            # The loader shifts labels, and has none for the last position, which `next` has.
            [each | {"position_ids": positions, "next": each["labels"]} for each in batches],
            sp_rank=groups._get_sequence_parallel_rank(),
            sp_group=groups._get_sequence_parallel_group(),
            sp_world_size=self._cp,
            device="cpu",
        )
        for each in cut:
            each["shift_labels"] = each.pop("next")
            yield {name: tensor.contiguous() for name, tensor in each.items()}  # as copies from a GPU are

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        if self._cp == 1:
            return self._engine(**batch, use_cache=False).loss
        parallelism = SimpleNamespace(sp_backend="deepspeed", sp_size=self._cp)
        return deepspeed_sp_compute_loss(None, self._engine, batch | {"use_cache": False}, False, parallelism)

    def gradients(self) -> Mapping[str, Piece]:
        found = {}
        for name, each in self._engine.module.named_parameters():
            gradient = safe_get_full_grad(each)
            if gradient is None:
                raise UserError(f"DeepSpeed keeps no gradient of {name} that can be read in this layout")
            found[name] = self._piece(name, gradient.detach())
        return found

    def update(self) -> Mapping[str, float]:
        (rate, *_) = self._engine.get_lr()
        norms = []
        clip = engines.clip_grad_norm_
        with patch.object(engines, "clip_grad_norm_", lambda **given: norms.append(clip(**given))):
            self._engine.step()
        norm = self._engine.get_global_grad_norm()
        if norm is None and norms:  # stage 0 computes it, and does not keep it
            (norm,) = norms
        return {"learning rate": rate} | ({} if norm is None else {"gradient norm": float(norm)})

    def modules(self) -> Mapping[str, nn.Module]:
        return {name: module for name, module in self._engine.module.named_modules() if name}

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder))
        if dist.get_rank() == 0:
            (folder / _LAYOUT).write_text(str(self._layout))

    def resume(self, folder: Path) -> None:
        if (saved := (folder / _LAYOUT).read_text()) != str(self._layout):
            raise UserError(f"a save of {saved} needs a universal checkpoint, which is not judged")
        path, _ = self._engine.load_checkpoint(str(folder))
        if path is None:
            raise UserError(f"DeepSpeed finds no checkpoint in {folder}")

    def close(self) -> None:
        self._engine.destroy()
        # They would outlive the process group of this layout.
        vars(groups).update({name: copy.copy(value) for name, value in _NO_GROUPS.items()})
        parallel_state_sp._release_sequence_parallel_groups()
        ALL_ATTENTION_FUNCTIONS["sdpa"] = self._sdpa
        deepspeed.comm.comm.cdb = None
        # A rank that has run more layouts than another would number its parameters and modules otherwise.
        deepspeed.zero.Init.param_id = 0
        DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0


def _equal(local: Tensor, full: Tensor) -> bool:
    return local.shape == full.shape and bool(torch.equal(local, full))


def build(layout: Layout, config: Config, options: Mapping[str, str]) -> Program:
    """Return the engine of this rank."""
    return DeepSpeedRun(layout, config, options)


def _refuse_unknown(layout: Layout, config: Config) -> None:
    """Raise `UserError` for what DeepSpeed cannot do here, or this adapter does not map."""
    if layout.size("ep") > 1:
        raise UserError(f"layout {layout}: AutoEP of DeepSpeed 0.19.8 does not run with transformers 5.23")
    if unknown := sorted(set(layout.sizes) - {"dp", "tp", "ep", "cp"}):
        raise UserError(f"layout {layout}: this adapter of DeepSpeed has no {unknown[0]}")
    if layout.size("cp") > 1 and layout.size("tp") > 1:
        raise UserError(
            f"layout {layout}: DeepSpeed has groups for Ulysses or for AutoTP: leave out cp or tp"
        )
    if layout.size("cp") > 1 and layout.size("dp") > 1:
        raise UserError(
            f"layout {layout}: torch.distributed.nn gathers the loss over cp, and with gloo its backward "
            "pass needs all ranks in the group: judge cp without dp"
        )
    if layout.v is not None or layout.schedule is not None or layout.shard is not None:
        raise UserError(f"layout {layout}: this adapter of DeepSpeed has no pipeline schedules and no shard")
    if unknown := [switch for switch in layout.switches if switch not in _SWITCHES]:
        raise UserError(f"layout {layout}: DeepSpeed has no +{unknown[0]}; it has {', '.join(_SWITCHES)}")
    refuse_unmapped(config, PACKAGE)


def _refuse_misspelt(name: str) -> None:
    """Raise `UserError` for a name of --set that DeepSpeed would ignore, as far as its names are listed."""
    first, *rest = name.split(".")
    if first == "zero_optimization" and rest:
        names, checked = _ZERO_NAMES, rest[0]
    else:
        names, checked = _NAMES - _ZERO_NAMES | {"zero_optimization"}, first
    if checked not in names:
        is_inside = checked in _ZERO_NAMES
        near = [f"zero_optimization.{checked}"] if is_inside else difflib.get_close_matches(checked, names, 1)
        hint = f", did you mean {near[0]}?" if near else ""
        raise UserError(f"--set {name}: DeepSpeed has no {checked}{hint}")


def _settings(layout: Layout, config: Config, options: Mapping[str, str]) -> dict[str, Any]:
    """Return DeepSpeed's configuration.

    Raises:
        UserError: the batch is not a multiple, or a value of --set is not JSON.
    """
    batch, dp, optimizer = layout.mbs or config.training.micro_batch_size, layout.size("dp"), config.optimizer
    count, rest = divmod(config.global_batch(dp), batch * dp)
    if rest or not count:
        raise UserError(f"--global-batch-size {config.global_batch(dp)} is not a multiple of {batch * dp}")
    if count % layout.size("cp"):
        raise UserError(
            f"layout {layout}: DeepSpeed's loader takes a microbatch of each rank of cp in turn, and {count} "
            f"microbatches are no multiple of {layout.size('cp')}: pass another --global-batch-size"
        )
    stages = [int(switch[-1]) for switch in layout.switches] or [0]
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": count,
        "gradient_clipping": optimizer.clip_grad,
        "steps_per_print": 1 << 30,
        "zero_optimization": {
            "stage": stages[0],
            "stage3_param_persistence_threshold": 0,  # else a small model is not cut
        },
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": optimizer.lr,
                "betas": [optimizer.adam_beta1, optimizer.adam_beta2],
                "eps": optimizer.adam_eps,
                "weight_decay": optimizer.weight_decay,
                "torch_adam": True,  # the others need compiled operators
            },
        },
    }
    if layout.size("tp") > 1:
        settings["tensor_parallel"] = {"autotp_size": layout.size("tp")}
    for name, text in options.items():
        _refuse_misspelt(name)
        *parents, last = name.split(".")
        group = settings
        for parent in parents:
            group = group.setdefault(parent, {})
            if not isinstance(group, dict):
                raise UserError(f"--set {name}: {parent} has no parts")
        try:
            group[last] = json.loads(text)
        except json.JSONDecodeError:
            raise UserError(f"--set {name}={text} is not JSON: write true, 2 or a string in quotes") from None
    return settings
