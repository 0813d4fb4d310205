"""Tables of the flags of Megatron-LM and Megatron-DeepSpeed that are not fields of the config.

A flag is in one of three tables: it is accepted because it would change nothing (`ACCEPTED`), it is accepted
with the value that turns its feature off (`ACCEPTED_IF_OFF`), or it is refused (`UNSUPPORTED`, in
`megatron_features`). Its `--no-` and `--disable-` forms need no row: they are accepted too. When megalite
gains a feature, remove the feature's flags from these tables.
"""

from __future__ import annotations

from typing import NamedTuple

TOPICS = {
    "model": "Model",
    "parallel": "Parallelism and communication",
    "recompute": "Recomputation and offloading",
    "optimizer": "Optimizer",
    "data": "Data and tokenizer",
    "training": "Training, precision and kernels",
    "checkpoint": "Checkpoints",
    "logging": "Logging and profiling",
    "dry_run": "Dry run",
}
"""Titles of the topics of flags; the topics are the groups of the config."""


class AcceptedFlags(NamedTuple):
    """Lists flags that change nothing.

    Attributes:
        topic: a key of `TOPICS`.
        why: why they are not needed, as text for a notice.
        flags: the flags without dashes, separated by spaces; NAME=1 takes one value, NAME=* any number.
    """

    topic: str
    why: str
    flags: str

    def num_values(self) -> dict[str, int | None]:
        """Return the number of values of each flag, by its name with dashes; None for any number."""
        counts = {"": 0, "1": 1, "*": None}
        pairs = (flag.partition("=") for flag in self.flags.split())
        return {f"--{name}": counts[values] for name, _, values in pairs}


class FlagIfOff(NamedTuple):
    """Lists flags of an unsupported feature, and the values that turn the feature off.

    Attributes:
        topic: a key of `TOPICS`.
        flags: the flags without dashes, separated by spaces.
        off: the accepted values, separated by spaces; numbers are compared as numbers.
        what: the feature.
        fix: what to do instead of passing another value.
    """

    topic: str
    flags: str
    off: str
    what: str
    fix: str


_NO_WORKERS = "samples are read from memory-mapped files, without worker processes"
_NO_RNG_STATE = (
    "there is no random state: weights, dropout and the order of samples follow from --seed and counters"
)
_SENDS = "it sets how messages are sent, not what is computed"

ACCEPTED = (
    AcceptedFlags("model", "there is one implementation of each model", "use-mcore-models legacy-tokenizer"),
    AcceptedFlags(
        "model", "attention scores are never scaled by the layer number", "no-query-key-layer-scaling"
    ),
    AcceptedFlags(
        "model",
        "initial weights are the same on any device and in any layout, and a checkpoint's replace them",
        "use-cpu-initialization init-model-with-meta-device no-initialization",
    ),
    AcceptedFlags(
        "model",
        "the fastest attention that dropout and the device allow is chosen, and logged at start-up; "
        "--attention-backend flash requires FlashAttention",
        """
        use-flash-attn use-flash-attn-v1 use-flash-attn-v2 use-flash-attn-triton use-flash-attn-builder
        flash-attention-version=1
        """,
    ),
    AcceptedFlags(
        "model",
        "experts compute every token that they get, and the router computes in fp32",
        """
        moe-grouped-gemm moe-use-legacy-grouped-gemm moe-permute-fusion moe-router-fusion moe-router-dtype=1
        moe-per-layer-logging moe-use-grouped-tensor moe-single-grouped-weight moe-single-grouped-bias
        use-grouped-gemm-for-shared-expert use-grouped-gemm-for-dense-mlp
        """,
    ),
    AcceptedFlags(
        "model",
        "experts compute the rows that they get, without padding",
        """
        moe-pad-expert-input-to-capacity moe-router-padding-for-fp8 moe-router-padding-for-quantization
        moe-pad-experts-for-cuda-graph-inference
        """,
    ),
    AcceptedFlags("model", "it selects a kernel, not what is computed", "mla-down-proj-fusion"),
    AcceptedFlags("model", "generation always keeps the latents", "cache-mla-latents"),
    AcceptedFlags(
        "model",
        "the shared expert always computes while rows of the other experts are in flight",
        "moe-shared-expert-overlap",
    ),
    AcceptedFlags("model", "--hybrid-override-pattern sets it", "is-hybrid-model"),
    AcceptedFlags(
        "optimizer",
        "torch updates the state in host memory; copies overlap with the update, with backward and with "
        "forward; gradients and buffers are pinned",
        """
        overlap-cpu-optimizer-d2h-h2d use-torch-optimizer-for-cpu-offload no-pin-cpu-grads no-pin-cpu-params
        cpu-torch-adam use-pin-memory
        """,
    ),
    AcceptedFlags(
        "optimizer",
        "adam is torch's fused AdamW, whose weight decay is decoupled",
        "decoupled-weight-decay ds-fused-adam",
    ),
    AcceptedFlags("optimizer", "it selects a kernel, not what is computed", "muon-use-syrk"),
    AcceptedFlags(
        "parallel",
        "parameters that tensor-parallel ranks duplicate get equal gradients on each rank, and stay equal",
        "sync-tp-duplicated-parameters",
    ),
    AcceptedFlags(
        "parallel",
        "tensor-parallel communication overlaps with GEMMs as --tp-comm-overlap says, without userbuffers",
        """
        tp-comm-overlap-ag tp-comm-overlap-rs tp-comm-overlap-rs-dgrad
        tp-comm-overlap-disable-qkv tp-comm-overlap-disable-fc1 tp-comm-split-ag tp-comm-split-rs
        tp-comm-bulk-dgrad tp-comm-bulk-wgrad tp-comm-bootstrap-backend=1 tp-comm-overlap-cfg=1
        no-async-tensor-model-parallel-allreduce
        """,
    ),
    AcceptedFlags(
        "parallel",
        _SENDS,
        """
        DDP-impl=1 use-contiguous-buffers-in-ddp no-contiguous-buffers-in-local-ddp
        no-scatter-gather-tensors-in-pipeline delay-param-gather no-delay-grad-reduce
        overlap-p2p-communication overlap-p2p-communication-warmup-flush use-ring-exchange-p2p
        align-grad-reduce align-param-gather overlap-param-gather-with-optimizer-step
        ddp-average-in-collective ddp-pad-buckets-for-high-nccl-busbw no-gradient-reduce-div-fusion
        high-priority-a2a-comm-stream
        use-nccl-ub use-sharp disable-symmetric-registration disable-gloo-process-groups
        use-gloo-process-groups use-tp-pp-dp-mapping ddp-num-buckets=1 sharp-enabled-group=1
        high-priority-stream-groups=* nccl-communicator-config-path=1 pipeline-model-parallel-comm-backend=1
        symmetric-ar-type=1 zero-reduce-scatter zero-contigious-gradients zero-reduce-bucket-size=1
        zero-allgather-bucket-size=1
        """,
    ),
    AcceptedFlags(
        "parallel",
        "it sets where gathered weights are stored, not what is computed",
        """
        fsdp-double-buffer fsdp-db-use-persist-buf-on-alloc-fail fsdp-manual-registration
        megatron-fsdp-version=1 megatron-fsdp-max-pool-double-buffer
        megatron-fsdp-enable-fine-grained-param-gather
        """,
    ),
    AcceptedFlags(
        "parallel",
        "gradients are summed in fp32, and the optimizer's weights are in fp32",
        "megatron-fsdp-main-grads-dtype=1 megatron-fsdp-main-params-dtype=1",
    ),
    AcceptedFlags("parallel", "every schedule computes the same update", "enable-zbh1-exact-semantics"),
    AcceptedFlags(
        "parallel",
        "the zero-bubble schedules (--pipeline-schedule) delay weight gradients",
        """
        defer-embedding-wgrad-compute delay-wgrad-compute wgrad-deferral-limit=1
        """,
    ),
    AcceptedFlags(
        "recompute",
        "--cpu-offload-activations above 0 turns it on, with copies that overlap computation",
        """
        cpu-offloading cpu-offloading-activations cpu-offloading-double-buffering
        cpu-offloading-retain-pinned-cpu-buffers
        """,
    ),
    AcceptedFlags(
        "recompute",
        "it sets how memory is allocated or traced, not what is computed",
        """
        contigious-checkpointing synchronize-each-layer profile-backward no-clone-scatter-output-in-embedding
        """,
    ),
    AcceptedFlags("data", "--fim-rate above 0 turns it on", "fim-data"),
    AcceptedFlags(
        "data", "only --dataloader-type cyclic, which is not supported, has it", "no-data-sharding"
    ),
    AcceptedFlags("data", _NO_WORKERS, "num-workers=1 valid-num-workers=1 num-dataset-builder-threads=1"),
    AcceptedFlags(
        "data",
        "files are memory-mapped, and the attention mask is made where attention is computed",
        """
        mmap-bin-files mmap-warmup create-attention-mask-in-dataloader dataloader-fast-cache-load
        dataloader-defer-npy-index-mmap per-dataset-sequences-path=1
        """,
    ),
    AcceptedFlags(
        "data",
        "only TikTokenizer, which is not supported, has it",
        "tiktoken-pattern=1 tiktoken-num-special-tokens=1",
    ),
    AcceptedFlags(
        "data",
        "training reads tokens, which preprocessing has already made",
        """
        tokenizer-hf-use-fast tokenizer-hf-no-use-fast tokenizer-hf-include-special-tokens
        tokenizer-hf-no-include-special-tokens tokenizer-sentencepiece-legacy
        no-tokenizer-sentencepiece-ignore-extra-whitespaces use-gigatoken allow-ambiguous-pad-tokens
        """,
    ),
    AcceptedFlags("training", _NO_RNG_STATE, "te-rng-tracker use-te-rng-tracker inference-rng-tracker"),
    AcceptedFlags(
        "training",
        "the loss is always the mean over all unmasked tokens of the global batch",
        "calculate-per-token-loss",
    ),
    AcceptedFlags(
        "training",
        "cached memory and extra synchronization do not change the run",
        "empty-unused-memory-level=1 train-sync-interval=1",
    ),
    AcceptedFlags(
        "training",
        "a run saves and exits on --exit-signals, and it has no worker processes",
        "exit-signal-handler-for-training exit-signal-handler-for-dataloader",
    ),
    AcceptedFlags(
        "training",
        "kernels accept every shape, and the start-up log names the kernels that run",
        "abort-on-unmet-fused-kernel-constraints",
    ),
    AcceptedFlags(
        "training",
        "the fastest kernel on the device is chosen, and logged at start-up",
        """
        no-masked-softmax-fusion no-scaled-masked-softmax-fusion scaled-upper-triang-masked-softmax-fusion=1
        no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion no-persist-layer-norm
        memory-efficient-layer-norm disable-mem-efficient-ln cross-entropy-loss-fusion
        cross-entropy-fusion-impl=1 fused-single-qkv-rope fused-residual-rmsnorm use-te-activation-func
        use-transformer-engine-op-fuser disable-jit-fuser enable-experimental
        """,
    ),
    AcceptedFlags(
        "training",
        "CUDA graphs are not used; results are the same",
        """
        enable-cuda-graph external-cuda-graph optimizer-cuda-graph cuda-graph-use-single-mempool
        cuda-graph-retain-backward-graph cuda-graph-impl=1 cuda-graph-scope=* cuda-graph-modules=*
        cuda-graph-warmup-steps=1
        """,
    ),
    AcceptedFlags(
        "training",
        "each scale is computed from the tensor itself, without a history",
        "fp8-amax-history-len=1 fp8-amax-compute-algo=1 fp8-interval=1 fp8-margin=1",
    ),
    AcceptedFlags(
        "training",
        "weights are gathered in their own dtype",
        "fp8-param-gather keep-fp8-transpose-cache keep-fp8-transpose-cache-when-using-custom-fsdp",
    ),
    AcceptedFlags("training", "layers are megalite's own", "transformer-impl=1"),
    AcceptedFlags(
        "training",
        "softmax, gradient sums and their communication are in fp32 or higher precision",
        "attention-softmax-in-fp32 fp32-allreduce",
    ),
    AcceptedFlags("checkpoint", _NO_RNG_STATE, "no-load-rng no-save-rng"),
    AcceptedFlags(
        "checkpoint",
        "checkpoints are checksummed safetensors files that any layout loads, and "
        "tools/convert_checkpoint.py also writes Hugging Face's format",
        """
        use-dist-ckpt auto-detect-ckpt-format ckpt-fully-parallel-save ckpt-fully-parallel-load
        ckpt-fully-parallel-load-exchange-algo=1 ckpt-fully-parallel-load-per-rank-objects
        ckpt-fully-parallel-save-process-group=1 ckpt-fully-parallel-load-process-group=1
        ckpt-pg-tensors-cache-path=1 ckpt-pg-tensors-cache-create no-ckpt-load-validate-sharding-integrity
        ckpt-drop-redundant-extra-state ckpt-assume-constant-structure use-persistent-ckpt-worker
        ckpt-format=1 dist-ckpt-format=1 dist-ckpt-strictness=1 dist-ckpt-workers=1
        dist-ckpt-save-pre-mcore-014 dist-ckpt-optim-fully-reshardable
        distrib-optim-fully-reshardable-mem-efficient no-strict-fsdp-dtensor-load async-strategy=1
        async-ckpt-cpu-priority=1 async-ckpt-io-priority=1 async-ckpt-use-cpu-shm verify-integrity
        universal-checkpoint
        """,
    ),
    AcceptedFlags(
        "checkpoint",
        "the tokenizer's files are named by flags, and a checkpoint holds their digest",
        "no-save-tokenizer-assets no-use-tokenizer-model-from-checkpoint-args",
    ),
    AcceptedFlags(
        "logging",
        "it is always logged",
        """
        log-learning-rate-to-tensorboard log-loss-scale-to-tensorboard log-world-size-to-tensorboard
        log-throughput-to-tensorboard no-log-learnig-rate-to-tensorboard
        """,
    ),
    AcceptedFlags("logging", "timers never make ranks wait for each other", "no-barrier-with-level-1-timing"),
    AcceptedFlags(
        "logging",
        "--wandb-project, --mlflow-experiment and --opentelemetry alone send to servers",
        "no-one-logger",
    ),
    AcceptedFlags(
        "logging", "there is one level of messages", "logging-level=1 log-level=1 log-level-replica=1"
    ),
)
ACCEPTED_IF_OFF = (
    FlagIfOff(
        "model",
        "rotary-seq-len-interpolation-factor",
        "1",
        "interpolated rotary positions",
        "pass --rope-scaling linear and --rope-scaling-factor",
    ),
    FlagIfOff(
        "model",
        "mup-attn-scale-power",
        "1",
        "muP with another power of the head size",
        "without --mup-base-head-dim, scores are divided by the root of the head size (power 0.5); remove it",
    ),
    FlagIfOff(
        "parallel",
        "ds-sequence-parallel-size",
        "1",
        "context parallelism, as in DeepSpeed's Ulysses",
        "pass --context-parallel-size with --cp-comm-type a2a instead",
    ),
    FlagIfOff(
        "parallel",
        "outer-dp-sharding-strategy",
        "no_shard",
        "sharding over groups of replicas",
        "pass --data-parallel-shard-degree for groups that hold the same",
    ),
    FlagIfOff(
        "optimizer",
        "main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype",
        "fp32",
        "gradient sums and optimizer state in low precision",
        "remove it",
    ),
    FlagIfOff(
        "optimizer",
        "muon-tp-mode",
        "duplicated distributed",
        "orthogonalizing each rank's part of a matrix alone",
        "pass distributed: Muon orthogonalizes whole matrices in every layout",
    ),
    FlagIfOff(
        "optimizer",
        "muon-fp32-matmul-prec",
        "medium",
        "more precise GEMMs in Muon",
        "remove it: they are in the precision of the weights",
    ),
    FlagIfOff(
        "optimizer", "muon-scalar-optimizer", "adam adamw", "another optimizer than AdamW", "remove it"
    ),
    FlagIfOff("optimizer", "head-lr-mult", "1", "a learning rate of the head", "remove it"),
    FlagIfOff(
        "optimizer", "remote-device", "none", "weights in host memory", "remove it; see --zero-stage 3"
    ),
    FlagIfOff(
        "data", "data-impl", "mmap infer", "another format of corpora", "preprocess to .bin and .idx files"
    ),
    FlagIfOff(
        "data",
        "dataloader-type",
        "single",
        "another order of samples",
        "remove it: a run reads the shuffled samples once, in order",
    ),
    FlagIfOff("data", "vocab-extra-ids", "0", "extra tokens for spans", "remove it"),
    FlagIfOff("data", "sample-rate", "1", "a part of the samples", "pass a smaller part in --split"),
    FlagIfOff("data", "mid-level-dataset-surplus", "0.005", "another surplus of samples", "remove it"),
    FlagIfOff(
        "training",
        "fp8-recipe",
        "tensorwise",
        "scales of blocks",
        "remove it: --fp8 scales each tensor by its own maximum",
    ),
    FlagIfOff("training", "rerun-mode", "disabled", "repeated iterations", "pass disabled"),
    FlagIfOff("training", "eval-only", "False", "an evaluation alone", "run tools/evaluate.py"),
    FlagIfOff("training", "use-dataset-only", "False", "another trainer with this data", "remove it"),
)
