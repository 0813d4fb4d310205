"""Rules for config fields that differ between a run and its checkpoint, or between the ranks of a run."""

from __future__ import annotations

from collections.abc import Mapping

from megalite.config.data import CORPUS_FIELDS, TOKENIZER_FIELDS
from megalite.config.model_fields import MODEL_OPTIONS
from megalite.config.option import OnResume
from megalite.distributed.axes import AXES, EXPERTS

_NAMES: Mapping[OnResume, str] = {
    OnResume.RUN: "seed global_batch_size rampup_batch_size step_batch_size_schedule seq_length_schedule",
    OnResume.SCHEDULE: """
        lr min_lr decoupled_lr decoupled_min_lr
        lr_decay_style lr_decay_iters lr_decay_samples lr_warmup_iters lr_warmup_samples
        lr_warmup_fraction lr_warmup_init lr_warmup_style lr_step_timing
        lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples
        weight_decay weight_decay_incr_style start_weight_decay end_weight_decay weight_decay_incr_iters
        weight_decay_incr_samples""",
    OnResume.SETTING: """
        fp8_format grad_communication_dtype
        optimizer adam_beta1 adam_beta2 adam_eps clip_grad
        muon_momentum muon_nesterov muon_scale_mode muon_extra_scale_factor muon_coefficient_type
        muon_num_ns_steps muon_split_qkv
        loss_scale min_loss_scale loss_scale_window hysteresis""",
    OnResume.DATA: """
        mock_data fim_rate fim_spm_rate fim_prefix_token fim_middle_token fim_suffix_token
        reset_position_ids reset_attention_mask eod_mask_loss short_seq_prob
        document_packing sft sft_packing sft_long_conversations""",
    OnResume.CORPUS: f"{' '.join(CORPUS_FIELDS)} aml_data_download_path split blend_by",
    OnResume.TOKENIZER: " ".join(TOKENIZER_FIELDS),
    OnResume.LOGGED: """
        initial_loss_scale train_iters train_samples eval_interval eval_iters
        check_for_nan_in_loss_and_grad check_for_spiky_loss spiky_loss_factor iterations_to_skip
        ema_decay compile deterministic gemm_epilogues replay_routing_from""",
    OnResume.FREE: f"""
        {" ".join({axis.field for each in (*AXES, EXPERTS) for axis in each.axes})}
        layout calibration moe_imbalance moe_token_dispatcher_type
        cp_comm_type hierarchical_context_parallel_sizes dynamic_context_parallel
        sequence_parallel tp_comm_overlap tp_comm_overlap_method tp_comm_overlap_chunks
        pipeline_schedule num_virtual_stages_per_pipeline_rank num_layers_per_virtual_pipeline_stage
        pipeline_layers decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split pp_partition_method
        ddp_bucket_size zero_stage data_parallel_shard_degree num_distributed_optimizer_instances
        fsdp_reshard_after_forward overlap_grad_reduce overlap_param_gather gradient_accumulation_fusion
        distributed_backend ranks_share_gpus distributed_timeout_minutes num_threads numa_binding
        keep_freed_memory optimizer_cpu_offload optimizer_nvme_offload optimizer_offload_fraction
        fp8_weight_cache recompute_granularity recompute_method recompute_num_layers recompute_modules
        distribute_saved_activations cross_entropy_chunks mlp_chunks cpu_offload_activations
        data_cache_path micro_batch_size
        eval_tasks eval_tasks_interval eval_tasks_folder eval_tasks_num_fewshot eval_tasks_limit
        exit_interval exit_duration_in_mins exit_signals kill_switch_path hang_timeout audit_interval
        manual_gc manual_gc_interval manual_gc_eval
        save load load_iteration save_interval save_interval_minutes async_save
        non_persistent_save_interval non_persistent_ckpt_type non_persistent_local_ckpt_dir
        exit_on_save_failure keep_last keep_every
        finetune load_optim save_optim use_checkpoint_args override_opt_param_scheduler
        use_checkpoint_opt_param_scheduler allow_data_change allow_settings_change
        log_interval log_line profile_modules profile_modules_depth profile_modules_top
        profile_modules_file log_throughput log_params_norm log_num_zeros_in_grad
        log_straggler_interval log_time_breakdown
        tensorboard_dir tensorboard_log_interval tensorboard_queue_size
        log_timers_to_tensorboard log_batch_size_to_tensorboard log_validation_ppl_to_tensorboard
        log_memory_to_tensorboard log_optimizer_states_to_tensorboard log_layer_grad_norms_interval
        log_experts_interval record_routing record_routing_iterations
        wandb_project wandb_exp_name wandb_save_dir mlflow_experiment opentelemetry
        metrics_file timing_log_level timing_log_option trace_pipeline trace_pipeline_path
        profile_execution profile_name profile profile_step_start profile_step_end profile_repeat
        profile_ranks
        use_pytorch_profiler pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack
        pytorch_profiler_collect_memory record_memory_history memory_snapshot_path
        dry_run world_size rank dry_run_json verify_layouts""",
}
RESUME_RULES: Mapping[str, OnResume] = {
    name: declared.on_resume for name, declared in MODEL_OPTIONS.items()
} | {name: rule for rule, names in _NAMES.items() for name in names.split()}
"""The rule of every config field; fields of the model declare theirs."""

MAY_DIFFER_BETWEEN_RANKS = frozenset(
    (
        # These may be on a node's own disk.
        "data_cache_path",
        "non_persistent_local_ckpt_dir",
        "optimizer_nvme_offload",
        "num_threads",  # nodes may have different CPUs
        "numa_binding",
        "keep_freed_memory",
        # These have no effect in a run of several ranks.
        *("dry_run", "world_size", "rank", "dry_run_json", "verify_layouts"),
    )
)
"""Config fields that may differ between ranks; all others must be equal."""


def fields_with(rule: OnResume) -> tuple[str, ...]:
    """Return the names of the fields that have this rule."""
    return tuple(name for name, its_rule in RESUME_RULES.items() if its_rule is rule)
