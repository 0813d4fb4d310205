"""Tables of the settings of a DeepSpeed JSON file, by how megalite handles them.

Names are dotted, such as ``zero_optimization.stage``. Defaults and schedules are from DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping

FIELDS: Mapping[str, str] = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_clipping": "clip_grad",
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.overlap_comm": "overlap_grad_reduce",
    "zero_optimization.reduce_bucket_size": "ddp_bucket_size",
    "optimizer.params.eps": "adam_eps",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_type": "lr_warmup_style",
    "scheduler.params.warmup_max_lr": "lr",
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
"""Settings whose value is copied to a field, with that field."""
OF_FP16 = {
    "fp16.loss_scale_window": "loss_scale_window",
    "fp16.hysteresis": "hysteresis",
    "fp16.min_loss_scale": "min_loss_scale",
}
"""Settings of a dynamic loss scale, with their fields."""
SWITCHED = ("tensorboard", "wandb", "nebula", "flops_profiler")
"""Sections that have no effect unless `enabled`."""
_WARMUP = ("warmup_num_steps", "warmup_type", "last_batch_iteration")
SCHEDULES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "WarmupLR": ("constant", (*_WARMUP, "warmup_min_lr", "warmup_max_lr")),
    "WarmupDecayLR": ("linear", (*_WARMUP, "warmup_min_lr", "warmup_max_lr", "total_num_steps")),
    "WarmupCosineLR": ("cosine", (*_WARMUP, "warmup_min_ratio", "cos_min_ratio", "total_num_steps")),
}
"""For each scheduler, the decay after the warm-up and the scheduler's parameters."""
OPTIMIZERS = ("adam", "adamw", "fusedadam")
"""Accepted optimizers. DeepSpeed ignores the case of their names."""
SCHEDULE_DEFAULTS: Mapping[str, float | int | str] = {
    "warmup_min_lr": 0.0,
    "warmup_max_lr": 0.001,
    "warmup_num_steps": 1000,
    "warmup_type": "log",
    "warmup_min_ratio": 0.0,
    "cos_min_ratio": 0.0001,
}
"""Defaults of a scheduler's parameters. Without warmup_max_lr, a WarmupLR uses the optimizer's lr."""
_GATHERED = "weights are gathered layer by layer; --fsdp-reshard-after-forward sets how long they stay"
NOT_NEEDED: Mapping[str, str] = {
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
REFUSED: Mapping[str, str] = {
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
    "data_types": "remove it: data_types.grad_accum_dtype can be fp32, in which gradients are always summed",
    "curriculum_learning": "remove it, and pass --seq-length-schedule TOKENS:LENGTH ...",
    "data_efficiency": "remove it: samples are read in their shuffled order",
    "progressive_layer_drop": "remove it: every layer runs",
    "eigenvalue": "remove it: it is not supported",
    "compression_training": "remove it: it is not supported",
    "elasticity": "remove it: a checkpoint resumes on any number of ranks",
    "autotuning": "remove it, and run tools/autotune.py",
}
"""Settings and sections that would change the run, with what to do instead; a value that means off is
accepted."""
