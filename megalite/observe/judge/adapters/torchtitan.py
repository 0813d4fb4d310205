"""Judge torchtitan: its trainer, models, parallelize functions, pipeline schedules and checkpoints, on CPU.

The program is torchtitan's own `Trainer`. It differs from a user's run in this: the samples are the judge's,
an update waits until the judge calls it, and the device is the CPU, which torchtitan never chooses. What has
no kernel there is replaced in `titan`: attention, grouped products, and a few operators.

The layouts in torchtitan's words: dp2 is FSDP2 over two ranks (as dp2+zero3), dp4shard2 HSDP, dp2shard1 DDP
in 0.2; +kept keeps gathered weights. tp2 is tensor parallelism with sequence parallelism, which it always
has. pp2 is 1F1B, pp2gpipe GPipe, pp2v2 Interleaved1F1B, pp2zb InterleavedZeroBubble, pp2zbv ZBVZeroBubble,
and pp2dpv DualPipeV. +full and +selective are activation checkpointing.
"""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import debug as dtensor_debug
from torchtitan.components.metrics import DeviceMemStats
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import parallel_dims as titan_axes
from torchtitan.distributed import utils as titan_distributed
from torchtitan.tools import logging as titan_logging
from torchtitan.tools import utils as titan_utils

from megalite.config import Config
from megalite.frontends.huggingface.families import to_hf
from megalite.observe.judge.program import Piece, Program, piece_of, refuse_unmapped, whole_number
from megalite.observe.verify.layouts import Layout
from megalite.utils.errors import UserError
from megalite.utils.torch_private import disable_context_parallelism

PACKAGE = "torchtitan"
VERSIONS = ("0.2.2", "0.3.0")
DEFAULTS = {"weight_decay": 0.0}  # torchtitan also decays norms, and megalite does not
LAYOUTS = (
    *("dp2", "tp2", "cp2", "pp2", "dp2shard1", "dp4shard2", "dp2tp2", "pp2dp2"),
    *("dp2+kept", "tp2+full", "pp2v2", "pp2zbv"),
)

for _module in (titan_utils, titan_axes, titan_distributed):
    _module.device_type, _module.device_module = "cpu", torch.cpu

_CONFIGURATION = "configurable" if find_spec("torchtitan.trainer") else "job_config"  # of 0.3, or of 0.2
titan = import_module(f"megalite.observe.judge.adapters.titan.{_CONFIGURATION}")
"""Part of the adapter that depends on torchtitan's version."""

_SCHEDULES = {
    None: "1F1B",
    "gpipe": "GPipe",
    "zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dpv": "DualPipeV",
}
"""torchtitan's schedules by those of a layout."""
_SWITCHES = ("sp", "zero3", "kept", "full", "selective")


def build(layout: Layout, config: Config, options: Mapping[str, str]) -> Program:
    """Return torchtitan's trainer for this rank.

    Args:
        options: fields of its configuration, such as ``parallelism.context_parallel_load_balancer=null``;
            ``args.NAME`` for an argument of its model; ``accumulation`` for the number of steps of a pipeline
            in an iteration; ``tokens=true`` compares the logged number of tokens, too.

    Raises:
        UserError: torchtitan has no such layout, model or option.
    """
    name, args = titan.model_of(config)
    job = _job_of(layout, config, whole_number("accumulation", options.get("accumulation", "1"), 1))
    for option, text in options.items():
        if option.startswith("args."):
            _set_option(args, option.removeprefix("args."), text)
        elif option not in ("accumulation", "tokens"):
            _set_option(job, option, text)
    if (tokens := options.get("tokens", "false").lower()) not in ("true", "false"):
        raise UserError(f"--set tokens={tokens}: write true or false")
    log = _Log(counts_tokens=tokens == "true")
    TORCH_DTYPE_MAP["float32"] = torch.get_default_dtype()  # fp64 if the judge widens the program
    os.environ["LOCAL_RANK"] = "0"  # the number of its device
    titan_logging.logger.addHandler(logging.NullHandler())
    try:
        trainer = titan.new_trainer(job, name, args, log, _NoData())
        return _TrainerProgram(trainer, job, log)
    except (AssertionError, NotImplementedError, ValueError) as error:
        raise UserError(f"torchtitan refuses layout {layout}: {' '.join(str(error).split())}") from error


def from_megalite(config: Config, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return megalite's tensors as torchtitan converts them from the hub's names and shapes."""
    name, args = titan.model_of(config)
    converted: dict[str, Tensor] = titan.from_hf(name, args, to_hf(full, config.model))
    return converted


def _job_of(layout: Layout, config: Config, num_pipeline_steps: int) -> Any:
    """Return torchtitan's configuration of the run in a layout."""
    if unknown := [each for each in layout.switches if each not in _SWITCHES]:
        raise UserError(f"torchtitan has no +{unknown[0]}: the switches are +{', +'.join(_SWITCHES)}")
    optimizer, pp, dp = config.optimizer, layout.size("pp"), layout.size("dp")
    refuse_unmapped(config, PACKAGE, "min_lr", "lr_decay_style", "lr_warmup_iters")
    if optimizer.lr_decay_style not in ("constant", "linear", "cosine"):
        raise UserError(
            f"torchtitan has no --lr-decay-style {optimizer.lr_decay_style}: pass constant, linear or cosine"
        )
    shard = dp if layout.shard is None else layout.shard
    job = titan.new_job(layout, config)
    job.parallelism.data_parallel_replicate_degree = dp // shard
    job.parallelism.data_parallel_shard_degree = shard
    job.parallelism.fsdp_reshard_after_forward = "never" if "kept" in layout.switches else "default"
    job.parallelism.tensor_parallel_degree = layout.size("tp")
    job.parallelism.context_parallel_degree = layout.size("cp")
    job.parallelism.pipeline_parallel_degree = pp
    job.parallelism.expert_parallel_degree = layout.size("ep")
    job.parallelism.pipeline_parallel_schedule = (
        "Interleaved1F1B" if layout.v else _SCHEDULES[layout.schedule]
    )
    if layout.v:
        names = titan.stage_names(pp * layout.v, config.model.num_layers)
        job.parallelism.module_fqns_per_model_part = names
    micro_batch_size = layout.mbs or config.training.micro_batch_size
    job.parallelism.pipeline_parallel_microbatch_size = micro_batch_size

    job.training.global_batch_size = config.global_batch(dp)
    job.training.local_batch_size = (
        micro_batch_size if pp == 1 else job.training.global_batch_size // dp // num_pipeline_steps
    )
    job.training.seq_len = config.model.seq_length
    job.training.mixed_precision_param = "float32"
    job.training.max_norm = optimizer.clip_grad or float("inf")
    job.training.steps = config.training.train_iters or job.training.steps
    job.lr_scheduler.warmup_steps = optimizer.lr_warmup_iters
    if optimizer.lr_decay_style == "constant":
        job.lr_scheduler.decay_ratio = 0.0
    else:
        job.lr_scheduler.decay_type = optimizer.lr_decay_style
        job.lr_scheduler.min_lr_factor = optimizer.min_lr / optimizer.lr if optimizer.lr else 0.0
    job.debug.seed = config.training.seed
    job.checkpoint.enable, job.checkpoint.interval, job.checkpoint.keep_latest_k = True, 1, 0
    return job


def _set_option(target: Any, name: str, text: str) -> None:
    """Set a field of nested dataclasses by its path; the text is JSON, or a string."""
    *path, last = name.split(".")
    for part in path:
        target = getattr(target, part, None)
    if not hasattr(target, last):
        raise UserError(
            f"torchtitan has no option {name}: write a path in its configuration, such as training.seq_len"
        )
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    wanted, given = type(getattr(target, last)), type(value)
    is_known = wanted in (bool, int, float, list, str)
    if is_known and given is not wanted and (wanted, given) != (float, int):
        raise UserError(f"--set {name}={text}: torchtitan wants a {wanted.__name__}")
    setattr(target, last, value)


class _NoData:
    """Dataloader of a trainer whose samples come from the judge."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class _Log:
    """Numbers that the trainer logs for an iteration, instead of their log; it also asks for GPU memory."""

    def __init__(self, counts_tokens: bool) -> None:
        self.counts_tokens = counts_tokens
        self.color = titan_utils.NoColor()
        self.device_memory_monitor = self
        self.device_name = "cpu"
        self.ntokens_since_last_log = 0
        self.data_loading_times: list[float] = []
        self.logged: dict[str, float] = {}

    def get_peak_stats(self) -> DeviceMemStats:
        return DeviceMemStats(*[0.0] * len(DeviceMemStats._fields))

    def should_log(self, step: int) -> bool:
        return True

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        extra = extra_metrics or {}
        self.logged = {
            "loss": global_avg_loss,
            "gradient norm": grad_norm,
            "learning rate": next(value for name, value in extra.items() if name.startswith("lr")),
        }
        if self.counts_tokens:
            self.logged["tokens"] = extra["n_tokens_seen"]

    def close(self) -> None:
        pass


class _Held:
    """Container of optimizers or of learning rates whose step waits for the judge."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __getattr__(self, name: str) -> Any:
        return getattr(self.held, name)

    def step(self) -> None:
        pass


class _TrainerProgram(Program):
    """torchtitan's trainer on one rank. Its iteration runs up to the update within `backward`."""

    def __init__(self, trainer: Any, job: Any, log: _Log) -> None:
        self.trainer, self.job, self.log = trainer, job, log
        self.unclipped: dict[str, Piece] = {}
        trainer.optimizers = _Held(trainer.optimizers)
        trainer.lr_schedulers = _Held(trainer.lr_schedulers)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self.trainer.model_parts:
            for name, parameter in part.named_parameters():
                yield _plain(name), parameter

    def weights(self) -> dict[str, Piece]:
        pieces = {name: piece_of(parameter) for name, parameter in self._parameters()}
        for part in self.trainer.model_parts:
            saved = part.state_dict().keys()  # which lack the names of wrappers
            buffers = ((_plain(name), buffer) for name, buffer in part.named_buffers())
            pieces |= {name: piece_of(buffer) for name, buffer in buffers if name in saved}
        return pieces

    def backward(self, samples: Tensor) -> dict[str, float]:
        trainer = self.trainer
        ranks, rank = 1, 0
        if trainer.parallel_dims.dp_enabled:
            mesh = trainer.parallel_dims.get_mesh("batch")
            ranks, rank = mesh.size(), mesh.get_local_rank()
        batches = titan.batches_of(self.job, samples.chunk(ranks)[rank])
        trainer.step += 1
        with self._unclipped_gradients():
            trainer.train_step(trainer.batch_generator(batches))
        knows_loss = not trainer.parallel_dims.pp_enabled or trainer.pp_has_last_stage
        return {"loss": self.log.logged["loss"]} if knows_loss else {}

    @contextmanager
    def _unclipped_gradients(self) -> Iterator[None]:
        """Copy the gradients before the trainer clips them, to which it goes on immediately."""
        clip = titan_distributed.clip_grad_norm_

        def copy_and_clip(*args: Any, **kwargs: Any) -> Any:
            pieces = (
                (name, piece_of(each.grad)) for name, each in self._parameters() if each.grad is not None
            )
            self.unclipped = {name: piece._replace(tensor=piece.tensor.clone()) for name, piece in pieces}
            return clip(*args, **kwargs)

        titan_distributed.clip_grad_norm_ = copy_and_clip
        try:
            yield
        finally:
            titan_distributed.clip_grad_norm_ = clip

    def gradients(self) -> dict[str, Piece]:
        return self.unclipped

    def update(self) -> dict[str, float]:
        self.trainer.optimizers.held.step()
        self.trainer.lr_schedulers.held.step()
        return {name: value for name, value in self.log.logged.items() if name != "loss"}

    def modules(self) -> dict[str, nn.Module]:
        parts = self.trainer.model_parts
        return {_plain(name): module for part in parts for name, module in part.named_modules() if name}

    def save(self, folder: Path) -> None:
        self.trainer.checkpointer.folder = str(folder)
        self.trainer.checkpointer.save(self.trainer.step)

    def resume(self, folder: Path) -> None:
        self.trainer.checkpointer.folder = str(folder)
        self.trainer.checkpointer.load()

    def close(self) -> None:
        self.trainer.close()
        disable_context_parallelism()
        dtensor_debug._clear_sharding_prop_cache()  # which has the meshes of this run
        gc.enable()  # the trainer has disabled it


def _plain(name: str) -> str:
    """Return the name of a module or of a tensor without those of wrappers."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("._checkpoint_wrapped_module", "")
