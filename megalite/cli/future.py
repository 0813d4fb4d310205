"""Flags of Megatron-LM and Megatron-DeepSpeed for what megalite does not have yet."""

from __future__ import annotations

from typing import NamedTuple


class Future(NamedTuple):
    """Something that is not here yet.

    Attributes:
        what: its name.
        fix: what to do without it.
        flags: the flags that ask for it, without their dashes.
    """

    what: str
    fix: str
    flags: str


FUTURE = (
    Future(
        "mixed precision",
        "remove it to train in fp32",
        """
        bf16 fp16 fp8 fp8-format initial-loss-scale min-loss-scale loss-scale-window hysteresis
        fp16-lm-cross-entropy fp32-residual-connection
        """,
    ),
    Future(
        "activation recomputation",
        "remove it to keep every activation",
        """
        checkpoint-activations checkpoint-num-layers checkpoint-in-cpu
        deepspeed-activation-checkpointing partition-activations recompute-activations
        recompute-granularity recompute-method recompute-num-layers recompute-modules
        distribute-saved-activations
        """,
    ),
    Future(
        "sequence parallelism",
        "remove it",
        """
        sequence-parallel context-parallel-size cp-comm-type
        """,
    ),
    Future(
        "mixture of experts",
        "remove it to train a dense model",
        """
        num-experts expert-model-parallel-size moe-router-topk moe-grouped-gemm
        """,
    ),
    Future(
        "interleaved pipeline stages",
        "remove it to have one chunk a rank",
        """
        num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank
        """,
    ),
    Future(
        "a distributed optimizer",
        "remove it: every data-parallel rank holds the whole optimizer state",
        """
        use-distributed-optimizer overlap-param-gather cpu-optimizer cpu-torch-adam
        """,
    ),
    Future(
        "a course in samples",
        "give iterations: --train-iters, --lr-decay-iters, --lr-warmup-iters",
        """
        train-samples lr-decay-samples lr-warmup-samples lr-wsd-decay-samples
        """,
    ),
    Future(
        "batch-size ramp-up",
        "remove it to have one --global-batch-size",
        """
        rampup-batch-size
        """,
    ),
    Future(
        "stopping at a file or a signal",
        "use --exit-duration-in-mins",
        """
        kill-switch-path exit-signal-handler
        """,
    ),
    Future(
        "this option of fill-in-the-middle",
        "remove it: whole documents are cut, and samples end with the tokenizer's end-of-document token",
        """
        fim-split-sample fim-fragment-rate fim-no-prefix fim-pad-token fim-eod-token
        """,
    ),
    Future(
        "resetting at document ends",
        "remove it: attention and positions run through a whole sample",
        """
        reset-position-ids reset-attention-mask eod-mask-loss
        """,
    ),
    Future(
        "a choice of attention kernel",
        "remove it",
        """
        use-flash-attn use-flash-attn-v2 attention-backend
        """,
    ),
    Future(
        "this model option",
        "remove it, or choose another --preset",
        """
        squared-relu apply-query-key-layer-scaling apply-residual-connection-post-layernorm
        rotary-percent rotary-seq-len-interpolation-factor qk-layernorm apply-layernorm-1p
        multi-latent-attention openai-gelu glu-activation
        """,
    ),
    Future(
        "this optimizer option",
        "remove it",
        """
        start-weight-decay end-weight-decay weight-decay-incr-style sgd-momentum decoupled-lr
        """,
    ),
    Future(
        "a partial or converted load",
        "remove it: --load takes up a run with all of its state",
        """
        finetune no-load-optim no-load-rng no-save-optim no-save-rng use-checkpoint-args
        load-iteration ckpt-step override-opt-param-scheduler use-checkpoint-opt-param-scheduler
        async-save ckpt-format dist-ckpt-format universal-checkpoint
        """,
    ),
    Future(
        "this log or profile",
        "remove it; see --metrics-file, --tensorboard-dir and --profile-execution",
        """
        log-params-norm log-num-zeros-in-grad log-memory-to-tensorboard
        log-world-size-to-tensorboard tensorboard-log-interval timing-log-level
        timing-log-option profile profile-step-start profile-step-end use-pytorch-profiler
        profile-ranks wandb-project wandb-exp-name wandb-save-dir codecarbon-dir log-level
        """,
    ),
)
"""A feature that comes in takes its flags out of here."""
