"""Settings of a DeepSpeed JSON file as fields of the config.

megalite does not use DeepSpeed. Every setting of its file sets a field, is not needed for a reason that is
logged, or is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalite.config.arguments import Diagnostics, UserSetting, parse_value
from megalite.config.config import Config
from megalite.config.fields import fields_by_flag, nearest_hint
from megalite.config.flags import flag_of
from megalite.config.rules.parallel_rules import replicas
from megalite.config.stage_layers import layers_per_stage, num_stages
from megalite.files import parse_json

_CPU_CHECKPOINTING = "activation_checkpointing.cpu_checkpointing"
_AUTO = "auto"
"""A value that leaves the setting to the program, as in files for transformers."""

_FIELDS: Mapping[str, str] = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_clipping": "clip_grad",
    "communication_data_type": "grad_communication_dtype",
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.overlap_comm": "overlap_grad_reduce",
    "zero_optimization.reduce_bucket_size": "ddp_bucket_size",
    "optimizer.params.lr": "lr",
    "optimizer.params.eps": "adam_eps",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_min_lr": "lr_warmup_init",
    "scheduler.params.warmup_max_lr": "lr",
    "scheduler.params.warmup_num_steps": "lr_warmup_iters",
    "scheduler.params.total_num_steps": "lr_decay_iters",
    "activation_checkpointing.partition_activations": "distribute_saved_activations",
    "wandb.project": "wandb_project",
    "nebula.persistent_storage_path": "save",
    "nebula.num_of_version_in_retention": "keep_last",
    "nebula.load_path": "load",
    "flops_profiler.profile_step": "profile_modules",
    "flops_profiler.top_modules": "profile_modules_top",
    "flops_profiler.output_file": "profile_modules_file",
}
"""Fields whose value is the setting's."""
_OF_FP16 = {
    "fp16.loss_scale_window": "loss_scale_window",
    "fp16.hysteresis": "hysteresis",
    "fp16.min_loss_scale": "min_loss_scale",
}
"""Fields of a dynamic loss scale."""
_SWITCHED = ("tensorboard", "wandb", "nebula", "flops_profiler")
"""Sections that have no effect unless `enabled`."""
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""The decay after the warm-up of each scheduler."""
_OPTIMIZERS = ("Adam", "AdamW", "FusedAdam")
_GATHERED = "weights are gathered layer by layer; --fsdp-reshard-after-forward sets how long they stay"
_NOT_NEEDED: Mapping[str, str] = {
    "zero_optimization.contiguous_gradients": "gradients are always in contiguous buffers",
    "zero_optimization.reduce_scatter": "sharded gradients are always reduce-scattered",
    "zero_optimization.allgather_partitions": "weights are always all-gathered by buckets",
    "zero_optimization.allgather_bucket_size": "weights are gathered in the gradients' buckets",
    "zero_optimization.round_robin_gradients": "gradients are divided by elements",
    "zero_optimization.sub_group_size": "one kernel updates all elements, or ranges if it is offloaded",
    "zero_optimization.stage3_max_live_parameters": _GATHERED,
    "zero_optimization.stage3_max_reuse_distance": _GATHERED,
    "zero_optimization.stage3_prefetch_bucket_size": "the next layer's weights are gathered ahead",
    "zero_optimization.stage3_param_persistence_threshold": "all weights are sharded",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "checkpoints hold all weights",
    "zero_optimization.ignore_unused_parameters": "every parameter is used",
    "zero_allow_untested_optimizer": "the optimizer is megalite's",
    "zero_force_ds_cpu_optimizer": "the optimizer is megalite's",
    "zero_optimization.offload_optimizer.pin_memory": "the buffers of the transfers are pinned",
    "zero_optimization.offload_optimizer.pipeline_read": "ranges are always read ahead",
    "zero_optimization.offload_optimizer.pipeline_write": "ranges are always written behind",
    "zero_optimization.offload_optimizer.buffer_count": "ranges pass through a ring of four buffers",
    "zero_optimization.offload_optimizer.fast_init": "the state is made where it is offloaded to",
    "aio.block_size": "ranges of 16 MiB are read and written",
    "aio.queue_depth": "each thread has one request of 16 MiB in flight",
    "aio.single_submit": "each thread has one request of 16 MiB in flight",
    "aio.overlap_events": "the threads always overlap",
    "aio.thread_count": "eight threads read and write",
    "aio.intra_op_parallelism": "eight threads read and write",
    "aio.use_gds": "the host updates the state: it does not pass through a GPU",
    "prescale_gradients": "losses are divided by the tokens of the global batch",
    "gradient_predivide_factor": "losses are divided by the tokens of the global batch",
    "bf16.immediate_grad_update": "gradients are added to their sums in backward",
    "fp16.auto_cast": "inputs are token numbers",
    "fp16.consecutive_hysteresis": "the hysteresis is Megatron-LM's",
    "optimizer.params.torch_adam": "the optimizer is megalite's",
    "optimizer.params.adam_w_mode": "weight decay is decoupled",
    "scheduler.params.last_batch_iteration": "a checkpoint holds the iteration",
    "activation_checkpointing.contiguous_memory_optimization": "memory is PyTorch's",
    "activation_checkpointing.synchronize_checkpoint_boundary": "recomputation needs no synchronization",
    "activation_checkpointing.number_checkpoints": "--recompute-num-layers sets the size of a group",
    "activation_checkpointing.profile": "--profile-modules measures modules",
    "nebula.enable_nebula_load": "--load reads any checkpoint",
    "flops_profiler.recompute_fwd_factor": "recomputed operations are counted",
    "dump_state": "--print-config prints the config",
    "memory_breakdown": "the metrics file has the memory",
    "checkpoint.use_node_local_storage": "--non-persistent-local-ckpt-dir saves on a node's disk",
    "checkpoint.tag_validation": "ranks always agree on a checkpoint",
    "checkpoint.load_universal": "every layout loads every checkpoint",
}
"""Settings without a counterpart that change nothing here, with the reason."""
_REFUSED: Mapping[str, str] = {
    "zero_optimization.offload_param": "weights are not offloaded: remove it, and pass --zero-stage 3",
    "zero_optimization.zero_hpz_partition_size": (
        "weights have one partition: remove it; zero_optimization.mics_shard_size shards weights, gradients "
        "and state within groups of ranks"
    ),
    "zero_optimization.mics_hierarchical_params_gather": "weights are gathered in one step: remove it",
    "zero_optimization.zero_quantized_weights": "weights are gathered as they are: remove it",
    "zero_optimization.zero_quantized_gradients": (
        "remove it, and pass --grad-communication-dtype bf16 for smaller messages"
    ),
    "amp": "apex' mixed precision is not supported: remove it, and pass --fp16 or --bf16",
    "sparse_gradients": "gradients are dense: remove it",
    "sparse_attention": "sparse attention is not supported: remove it",
    "csv_monitor": "remove it: --metrics-file writes every figure",
    "comms_logger": "remove it: --timing-log-level 2 and --trace-pipeline time the communication",
    "data_types": "remove it: gradient sums are in fp32",
    "curriculum_learning": "remove it: the sequence length does not change during a run",
    "data_efficiency": "remove it: samples are read in their shuffled order",
    "progressive_layer_drop": "remove it: every layer runs",
    "eigenvalue": "remove it: it is not supported",
    "compression_training": "remove it: it is not supported",
    "elasticity": "remove it: a checkpoint resumes on any number of ranks",
    "autotuning": "remove it, and run tools/autotune.py",
}
"""Settings and sections that would change the run, with what to do; an off value is accepted."""


@dataclass(frozen=True)
class DeepSpeedFile:
    """Hold the settings of a file by their dotted names, such as ``zero_optimization.stage``."""

    path: str
    values: Mapping[str, Any]

    @staticmethod
    def read(path: str, diagnostics: Diagnostics) -> DeepSpeedFile | None:
        """Read a file, or report why it cannot be read."""
        try:
            content = parse_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            diagnostics.add_problem(f"--deepspeed_config {path} cannot be read: {reason}")
            return None
        if not isinstance(content, dict):
            diagnostics.add_problem(
                f"--deepspeed_config {path} is not a JSON object: pass DeepSpeed's own file"
            )
            return None
        values = dict(_flattened(content))
        off = [name for name in _SWITCHED if not values.get(f"{name}.enabled", False)]
        kept = {
            key: value for key, value in values.items() if value != _AUTO and key.partition(".")[0] not in off
        }
        return DeepSpeedFile(path, kept)

    def settings(self, diagnostics: Diagnostics) -> list[UserSetting]:
        """Return the fields that the file sets, and report what it cannot set."""
        found = list(self._settings_of(self._fields_of, diagnostics))
        unneeded = [f"{key} ({_NOT_NEEDED[key]})" for key in self.values if key in _NOT_NEEDED]
        if f"{_OFFLOAD}.nvme_path" in self.values and self.values.get(f"{_OFFLOAD}.device") != "nvme":
            unneeded.append(f"{_OFFLOAD}.nvme_path (the device is not nvme)")
        if unneeded:
            diagnostics.notices.append(f"{self.path}: not needed: {', '.join(unneeded)}")
        return found

    def soft_settings(self, diagnostics: Diagnostics) -> list[UserSetting]:
        """Return settings that any flag or file overrides: those of DeepSpeed's own printing."""
        return list(self._settings_of(_soft_fields_of, diagnostics))

    def _settings_of(
        self, fields_of: Callable[[str, Any], Mapping[str, Any]], diagnostics: Diagnostics
    ) -> Iterator[UserSetting]:
        """Yield the fields that each setting of the file sets by `fields_of`; report those that raise."""
        for key, value in self.values.items():
            try:
                for name, field_value in fields_of(key, value).items():
                    yield self._setting(key, name, field_value)
            except ValueError as error:
                diagnostics.add_problem(f"{self.path}: {key} {error}")

    def _setting(self, key: str, name: str, value: Any) -> UserSetting:
        """Return a field's setting, whose value a flag of the same text would have."""
        field = fields_by_flag()[flag_of(name)]
        if isinstance(value, float) and value.is_integer() and field.kind.item is int:
            value = int(value)  # DeepSpeed's files have sizes such as 5e8
        text = value if isinstance(value, str) else str(value).lower()
        parsed = None if value is None else parse_value(field, (text,))
        return UserSetting(field, parsed, f"{self.path}: {key}")

    def _fields_of(self, key: str, value: Any) -> Mapping[str, Any]:
        """Return the fields that a setting sets, by name.

        Raises:
            ValueError: it is not supported; the message continues its name.
        """
        section = key.partition(".")[0]
        if key in _FIELDS:
            return {_FIELDS[key]: None if value == "fp32" else value}
        if key in _OF_FP16:
            return {_OF_FP16[key]: value} if self.values.get("fp16.enabled") else {}
        if key in _HANDLERS:
            return _HANDLERS[key](self.values, value)
        if key in _NOT_NEEDED or key in _SOFT or key in _LATER:
            return {}
        for name in (key, key.rpartition(".")[0], section):
            if name in _REFUSED:
                if _is_off(value) or self.values.get(f"{section}.enabled") is False:
                    return {}
                raise ValueError(f"is {value}: {_REFUSED[name]}")
        known = [*_FIELDS, *_OF_FP16, *_HANDLERS, *_NOT_NEEDED, *_SOFT, *_LATER, *_REFUSED]
        raise ValueError(f"is not a known setting{nearest_hint(key, known)}: remove it")

    def completed(self, config: Config, world_size: int | None, diagnostics: Diagnostics) -> Config:
        """Return the config with what the file says of combinations, and report what contradicts it."""
        for key, name in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
            if self.values.get(f"{key}.enabled") is False and config.model.params_dtype == name:
                diagnostics.add_problem(
                    f"{self.path}: {key}.enabled is false, but --params-dtype is {name}: remove one"
                )
        for setting in self.soft_settings(Diagnostics()):  # the mistakes in them are reported already
            name = setting.field.name
            used = config.values()[name]
            if used != setting.value:
                key = setting.name.removeprefix(f"{self.path}: ")
                diagnostics.notices.append(
                    f"{setting.name} is {self.values[key]}, but {flag_of(name)} {used} is used"
                )
        config = self._with_offload(config, diagnostics)
        return self._with_accumulation(config, world_size, diagnostics)

    def _with_offload(self, config: Config, diagnostics: Diagnostics) -> Config:
        """Offload the inputs of recomputed layers, those of every layer, if the file says so."""
        key, recompute = _CPU_CHECKPOINTING, config.recompute
        if not self.values.get(key):
            return config
        # A config with another mistake in its layout has no stages; the rules report it.
        number = max(layers_per_stage(config)) if num_stages(config) <= config.model.num_layers else 0
        if recompute.recompute_granularity != "full":
            diagnostics.add_problem(
                f"{self.path}: {key} is true, but no layer is recomputed: pass --recompute-granularity full, "
                f"or set it to false and pass --cpu-offload-activations {number}"
            )
        elif recompute.cpu_offload_activations not in (0, number):
            diagnostics.add_problem(
                f"{self.path}: {key} is true, which offloads the {number} layers of a stage, but "
                f"--cpu-offload-activations is {recompute.cpu_offload_activations}: make them equal"
            )
        return replace(config, recompute=replace(recompute, cpu_offload_activations=number))

    def _with_accumulation(self, config: Config, world_size: int | None, diagnostics: Diagnostics) -> Config:
        """Set the global batch from the accumulation steps, or compare it with them."""
        steps = self.values.get("gradient_accumulation_steps")
        if steps is None:
            return config
        training, dp = config.training, replicas(config, world_size)
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            diagnostics.add_problem(
                f"{self.path}: gradient_accumulation_steps is {steps}: it must be a positive whole number"
            )
        elif dp is None and training.global_batch_size is None:
            diagnostics.add_problem(
                f"{self.path}: gradient_accumulation_steps is {steps}, which makes a global batch once the "
                "number of ranks is known: pass --global-batch-size, or start with torchrun"
            )
        elif dp is not None and training.global_batch_size is None:
            batch = steps * training.micro_batch_size * dp
            return replace(config, training=replace(training, global_batch_size=batch))
        elif dp is not None and steps * training.micro_batch_size * dp != training.global_batch_size:
            assert training.global_batch_size is not None
            each = training.global_batch_size / (training.micro_batch_size * dp)
            diagnostics.add_problem(
                f"{self.path}: gradient_accumulation_steps is {steps}, but --global-batch-size "
                f"{training.global_batch_size} / (--micro-batch-size {training.micro_batch_size} x "
                f"data-parallel size {dp}) is {each:g}: make them equal"
            )
        return config


def _flattened(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):  # an empty section sets nothing
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_off(value: Any) -> bool:
    """Return whether a refused setting turns nothing on; a partition of 1 rank is none."""
    return value is None or value is False or value == "none" or (value is not True and value in (0, 1))


def _soft_fields_of(key: str, value: Any) -> Mapping[str, Any]:
    if key not in _SOFT:
        return {}
    name, value_of = _SOFT[key]
    return {} if value_of(value) is None else {name: value_of(value)}


def _precision(name: str) -> Callable[[Mapping[str, Any], Any], Mapping[str, Any]]:
    return lambda values, enabled: {"params_dtype": name} if enabled else {}


def _loss_scale(values: Mapping[str, Any], scale: Any) -> Mapping[str, Any]:
    """Return the constant loss scale; 0 is a dynamic one."""
    return {"loss_scale": scale or None} if values.get("fp16.enabled") else {}


def _initial_loss_scale(values: Mapping[str, Any], power: Any) -> Mapping[str, Any]:
    if not values.get("fp16.enabled") or values.get("fp16.loss_scale", 0):
        return {}
    if not isinstance(power, int | float) or abs(power) >= 1024:  # a larger power of two is not a float
        raise ValueError(f"is {power}: it must be the exponent of a loss scale, such as 16")
    return {"initial_loss_scale": 2.0**power}


def _betas(values: Mapping[str, Any], betas: Any) -> Mapping[str, Any]:
    if not isinstance(betas, list) or len(betas) != 2:
        raise ValueError(f"is {betas}: it must be a list of two numbers")
    return {"adam_beta1": betas[0], "adam_beta2": betas[1]}


def _optimizer(values: Mapping[str, Any], name: Any) -> Mapping[str, Any]:
    if name not in _OPTIMIZERS:
        raise ValueError(f"is {name}: the optimizer is AdamW, choose one of {', '.join(_OPTIMIZERS)}")
    if values.get("optimizer.params.adam_w_mode") is False:
        raise ValueError("is Adam with adam_w_mode false: weight decay is decoupled, remove adam_w_mode")
    return {}


def _scheduler(values: Mapping[str, Any], name: Any) -> Mapping[str, Any]:
    if name not in _SCHEDULES:
        raise ValueError(f"is {name}: choose one of {', '.join(_SCHEDULES)}, or pass --lr-decay-style")
    if name == "WarmupCosineLR":
        lr = values.get("optimizer.params.lr")
        ratio = values.get("scheduler.params.cos_min_ratio", 1e-4)
        if not isinstance(lr, int | float) or not isinstance(ratio, int | float):
            raise ValueError("is WarmupCosineLR, which needs optimizer.params.lr and a number cos_min_ratio")
        return {"lr_decay_style": "cosine", "min_lr": lr * ratio}
    if values.get("scheduler.params.warmup_type", "log") != "linear":
        raise ValueError(f"is {name} with a logarithmic warm-up: set warmup_type to linear")
    return {"lr_decay_style": _SCHEDULES[name]}


def _warmup_min_ratio(values: Mapping[str, Any], ratio: Any) -> Mapping[str, Any]:
    lr = values.get("optimizer.params.lr")
    if not isinstance(lr, int | float) or not isinstance(ratio, int | float):
        raise ValueError("needs optimizer.params.lr")
    return {"lr_warmup_init": lr * ratio}


_OFFLOAD = "zero_optimization.offload_optimizer"


def _offload_device(values: Mapping[str, Any], device: Any) -> Mapping[str, Any]:
    if device == "none":
        return {}
    if device == "cpu":
        return {"optimizer_cpu_offload": True}
    if device != "nvme":
        raise ValueError(f"is {device}: choose one of none, cpu, nvme")
    folder = values.get(f"{_OFFLOAD}.nvme_path")
    if not isinstance(folder, str):
        raise ValueError("is nvme, which needs nvme_path: set it to a folder on a local disk")
    return {"optimizer_nvme_offload": folder}


def _offload_ratio(values: Mapping[str, Any], ratio: Any) -> Mapping[str, Any]:
    """Return the offloaded share; 0 offloads nothing."""
    device = values.get(f"{_OFFLOAD}.device", "none")
    if ratio == 0 and device != "none":
        raise ValueError(f"is 0, but {_OFFLOAD}.device is {device}: set the device to none")
    return {} if device == "none" else {"optimizer_offload_fraction": ratio}


def _tensorboard(values: Mapping[str, Any], path: Any) -> Mapping[str, Any]:
    return {"tensorboard_dir": str(Path(str(path)) / str(values.get("tensorboard.job_name", "")))}


def _profiled_iteration(values: Mapping[str, Any], is_on: Any) -> Mapping[str, Any]:
    return {} if "flops_profiler.profile_step" in values else {"profile_modules": 1}  # DeepSpeed's default


def _profiled_depth(values: Mapping[str, Any], depth: Any) -> Mapping[str, Any]:
    """Return the depth of the tables; -1 is the whole tree."""
    is_whole = depth == -1 or values.get("flops_profiler.detailed") is False
    return {} if is_whole else {"profile_modules_depth": depth}


def _mics_shard_size(values: Mapping[str, Any], size: Any) -> Mapping[str, Any]:
    """Return the size of the groups that ZeRO 3 shards within; -1 is off."""
    if size in (None, -1):
        return {}
    stage = values.get("zero_optimization.stage")
    if stage != 3:
        raise ValueError(
            f"is {size} with zero_optimization.stage {stage}: it shards stage 3 only; remove it, and pass "
            f"--data-parallel-shard-degree {size} to shard stage 1 or 2 within groups"
        )
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"is {size}: it must be a positive number of ranks")
    return {"data_parallel_shard_degree": size}


def _persistent_time_interval(values: Mapping[str, Any], seconds: Any) -> Mapping[str, Any]:
    if not isinstance(seconds, int | float) or seconds <= 0:
        raise ValueError(f"is {seconds}: it must be a positive number of seconds")
    return {"save_interval_minutes": seconds / 60.0}


_HANDLERS: Mapping[str, Callable[[Mapping[str, Any], Any], Mapping[str, Any]]] = {
    "bf16.enabled": _precision("bf16"),
    "bfloat16.enabled": _precision("bf16"),  # its older name
    "fp16.enabled": _precision("fp16"),
    "fp16.loss_scale": _loss_scale,
    "nebula.persistent_time_interval": _persistent_time_interval,
    "fp16.initial_scale_power": _initial_loss_scale,
    "optimizer.params.betas": _betas,
    "optimizer.type": _optimizer,
    "zero_optimization.mics_shard_size": _mics_shard_size,
    "scheduler.type": _scheduler,
    "scheduler.params.warmup_min_ratio": _warmup_min_ratio,
    "zero_optimization.offload_optimizer.device": _offload_device,
    "zero_optimization.offload_optimizer.ratio": _offload_ratio,
    "zero_optimization.cpu_offload": lambda values, is_on: {"optimizer_cpu_offload": True} if is_on else {},
    "tensorboard.output_path": _tensorboard,
    "flops_profiler.enabled": _profiled_iteration,
    "flops_profiler.detailed": lambda values, is_on: {} if is_on else {"profile_modules_depth": 0},
    "flops_profiler.module_depth": _profiled_depth,
}
"""Functions from all settings and the value of one to the fields that it sets."""
_SOFT: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "steps_per_print": ("log_interval", lambda steps: steps),
    "wall_clock_breakdown": ("timing_log_level", lambda is_on: 2 if is_on else None),
}
"""Settings that any other overrides, with their field and its value."""
_LATER = (
    _CPU_CHECKPOINTING,
    "gradient_accumulation_steps",
    "scheduler.params.warmup_type",
    "scheduler.params.cos_min_ratio",
    "tensorboard.job_name",
    "zero_optimization.offload_optimizer.nvme_path",
    *(f"{name}.enabled" for name in _SWITCHED),
)
"""Settings that others read."""
