"""Tables of the flags of Megatron-LM and Megatron-DeepSpeed that are not fields of the config.

A flag is in one of three tables: it is accepted because it would change nothing (`ACCEPTED`), it is accepted
with the value that turns its feature off (`ACCEPTED_IF_OFF`), or it is refused (`UNSUPPORTED`). A new feature
removes its flags from these tables.
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
"""Titles of the topics of flags: the groups of the config."""


class AcceptedFlags(NamedTuple):
    """Name flags that change nothing.

    Attributes:
        topic: a key of `TOPICS`.
        why: why they are not needed, as a notice says it.
        flags: without their dashes, separated by spaces.
        num_values: number of values that each of them takes.
    """

    topic: str
    why: str
    flags: str
    num_values: int = 0


class FlagIfOff(NamedTuple):
    """Name a flag whose feature is missing, and the values that turn the feature off.

    Attributes:
        topic: a key of `TOPICS`.
        flag: with its dashes.
        off: the accepted values, separated by spaces; numbers are compared as numbers.
        what: the feature.
        fix: what to do instead of another value.
    """

    topic: str
    flag: str
    off: str
    what: str
    fix: str


class UnsupportedFeature(NamedTuple):
    """Name a feature that megalite does not have.

    Attributes:
        topic: a key of `TOPICS`.
        what: its name.
        fix: what to do instead.
        flags: the flags that request it, without their dashes.
        prefixes: all flags that begin with one of these request it too.
    """

    topic: str
    what: str
    fix: str
    flags: str
    prefixes: str = ""


_NO_WORKERS = "samples are read from memory-mapped files, without worker processes"
_FUSION = "the fastest kernel on the device is chosen, and logged at start-up"
_NO_RNG_STATE = (
    "there is no random state: weights, dropout and the order of samples follow from --seed and counters"
)
_SAFETENSORS = (
    "checkpoints are safetensors files that any layout loads; tools/convert_checkpoint.py writes others"
)

ACCEPTED = (
    AcceptedFlags("model", "there is one implementation of each model", "use-mcore-models"),
    AcceptedFlags(
        "model", "attention scores are never scaled by the layer number", "no-query-key-layer-scaling"
    ),
    AcceptedFlags(
        "model",
        "weights of norms are not decayed, so their training does not depend on it; checkpoints hold the "
        "whole weight",
        "apply-layernorm-1p layernorm-zero-centered-gamma",
    ),
    AcceptedFlags(
        "model",
        "initial weights are the same on any device and in any layout",
        "use-cpu-initialization init-model-with-meta-device",
    ),
    AcceptedFlags(
        "optimizer",
        "an update in host memory is torch's and overlaps its copies, which backward and forward overlap; "
        "gradients and buffers are pinned",
        """
        overlap-cpu-optimizer-d2h-h2d use-torch-optimizer-for-cpu-offload no-pin-cpu-grads no-pin-cpu-params
        """,
    ),
    AcceptedFlags(
        "parallel",
        "parameters that tensor-parallel ranks duplicate get equal gradients on each rank, and stay equal",
        "sync-tp-duplicated-parameters",
    ),
    AcceptedFlags(
        "parallel",
        "tensor-parallel communication is not split into parts that overlap with GEMMs; results are the same",
        """
        tp-comm-overlap tp-comm-overlap-ag tp-comm-overlap-rs tp-comm-overlap-rs-dgrad
        disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs tp-comm-overlap-disable-qkv
        tp-comm-overlap-disable-fc1 tp-comm-split-ag tp-comm-split-rs tp-comm-bulk-dgrad tp-comm-bulk-wgrad
        no-async-tensor-model-parallel-allreduce
        """,
    ),
    AcceptedFlags(
        "parallel",
        "it sets how messages are sent, not what is computed",
        """
        overlap-p2p-communication no-overlap-p2p-communication overlap-p2p-communication-warmup-flush
        use-ring-exchange-p2p align-grad-reduce no-align-grad-reduce align-param-gather no-align-param-gather
        overlap-param-gather-with-optimizer-step ddp-average-in-collective
        ddp-pad-buckets-for-high-nccl-busbw no-gradient-reduce-div-fusion use-nccl-ub use-sharp
        disable-symmetric-registration disable-gloo-process-groups use-gloo-process-groups
        use-tp-pp-dp-mapping
        """,
    ),
    AcceptedFlags(
        "parallel",
        "it sets how messages are sent, not what is computed",
        "ddp-num-buckets sharp-enabled-group high-priority-stream-groups nccl-communicator-config-path",
        1,
    ),
    AcceptedFlags(
        "parallel",
        "the zero-bubble schedules (--pipeline-schedule) delay weight gradients",
        "defer-embedding-wgrad-compute delay-wgrad-compute",
    ),
    AcceptedFlags(
        "recompute",
        "--cpu-offload-activations above 0 turns it on, with copies that overlap computation",
        "cpu-offloading cpu-offloading-activations cpu-offloading-double-buffering",
    ),
    AcceptedFlags("optimizer", "adam is AdamW, whose weight decay is decoupled", "decoupled-weight-decay"),
    AcceptedFlags("data", "--fim-rate above 0 turns it on", "fim-data"),
    AcceptedFlags("data", _NO_WORKERS, "num-workers valid-num-workers num-dataset-builder-threads", 1),
    AcceptedFlags(
        "data",
        "files are memory-mapped, and the attention mask is made where attention is computed",
        """
        mmap-bin-files no-mmap-bin-files create-attention-mask-in-dataloader
        no-create-attention-mask-in-dataloader dataloader-fast-cache-load dataloader-defer-npy-index-mmap
        """,
    ),
    AcceptedFlags("data", "only TikTokenizer, which is not supported, has a pattern", "tiktoken-pattern", 1),
    AcceptedFlags("training", _NO_RNG_STATE, "te-rng-tracker use-te-rng-tracker inference-rng-tracker"),
    AcceptedFlags(
        "training",
        "the loss is always the mean over all tokens of the global batch that count",
        "calculate-per-token-loss",
    ),
    AcceptedFlags(
        "training",
        "Python's garbage collection and cached memory do not change the run",
        "manual-gc no-manual-gc-eval",
    ),
    AcceptedFlags(
        "training",
        "Python's garbage collection and cached memory do not change the run",
        "manual-gc-interval empty-unused-memory-level",
        1,
    ),
    AcceptedFlags(
        "training",
        "kernels accept every shape, and the start-up log names those that run",
        "abort-on-unmet-fused-kernel-constraints",
    ),
    AcceptedFlags(
        "training",
        _FUSION,
        """
        no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion
        no-rope-fusion no-persist-layer-norm memory-efficient-layer-norm cross-entropy-loss-fusion
        fused-single-qkv-rope fused-residual-rmsnorm use-te-activation-func use-transformer-engine-op-fuser
        disable-jit-fuser enable-experimental
        """,
    ),
    AcceptedFlags("training", _FUSION, "cross-entropy-fusion-impl", 1),
    AcceptedFlags(
        "training",
        "CUDA graphs are not used; results are the same",
        """
        enable-cuda-graph external-cuda-graph cuda-graph-use-single-mempool
        cuda-graph-retain-backward-graph
        """,
    ),
    AcceptedFlags(
        "training",
        "CUDA graphs are not used; results are the same",
        "cuda-graph-impl cuda-graph-scope cuda-graph-warmup-steps",
        1,
    ),
    AcceptedFlags(
        "training",
        "a scale follows from the tensor that it scales, without a history",
        "fp8-amax-history-len fp8-amax-compute-algo fp8-interval fp8-margin",
        1,
    ),
    AcceptedFlags("training", "weights are gathered in their own dtype", "fp8-param-gather"),
    AcceptedFlags("training", "layers are megalite's own", "transformer-impl", 1),
    AcceptedFlags(
        "training",
        "softmax, gradient sums and their communication are at least in fp32",
        "attention-softmax-in-fp32",
    ),
    AcceptedFlags("checkpoint", _NO_RNG_STATE, "no-load-rng no-save-rng"),
    AcceptedFlags(
        "checkpoint",
        _SAFETENSORS,
        """
        use-dist-ckpt auto-detect-ckpt-format ckpt-fully-parallel-save no-ckpt-fully-parallel-save
        ckpt-fully-parallel-load ckpt-assume-constant-structure use-persistent-ckpt-worker
        """,
    ),
    AcceptedFlags("checkpoint", _SAFETENSORS, "ckpt-format dist-ckpt-format dist-ckpt-strictness", 1),
    AcceptedFlags(
        "logging",
        "it is always logged",
        """
        log-learning-rate-to-tensorboard log-loss-scale-to-tensorboard log-world-size-to-tensorboard
        log-throughput-to-tensorboard
        """,
    ),
    AcceptedFlags("logging", "timers never make ranks wait for each other", "no-barrier-with-level-1-timing"),
    AcceptedFlags("logging", "megalite sends nothing to a server but --wandb-project", "no-one-logger"),
    AcceptedFlags("logging", "there is one level of messages", "logging-level log-level", 1),
)
_MOE = "remove it to train a dense model"
ACCEPTED_IF_OFF = (
    FlagIfOff("model", "--rotary-percent", "1", "rotary positions of a part of each head", "pass 1.0"),
    FlagIfOff(
        "model",
        "--rotary-seq-len-interpolation-factor",
        "1",
        "interpolated rotary positions",
        "remove it, or set another --rotary-base",
    ),
    FlagIfOff("model", "--softmax-type", "vanilla", "a softmax with sinks", "pass vanilla"),
    FlagIfOff("model", "--mtp-num-layers", "0", "multi-token prediction", "remove it"),
    FlagIfOff("model", "--expert-model-parallel-size", "1", "mixture of experts", _MOE),
    FlagIfOff("model", "--expert-tensor-parallel-size", "1", "mixture of experts", _MOE),
    FlagIfOff("parallel", "--context-parallel-size", "1", "context parallelism", "remove it"),
    FlagIfOff("optimizer", "--main-grads-dtype", "fp32", "gradient sums in 16 bits", "remove it"),
    FlagIfOff("optimizer", "--main-params-dtype", "fp32", "main weights in 16 bits", "remove it"),
    FlagIfOff("optimizer", "--exp-avg-dtype", "fp32", "moments in fewer bits", "remove it"),
    FlagIfOff("optimizer", "--exp-avg-sq-dtype", "fp32", "moments in fewer bits", "remove it"),
    FlagIfOff("optimizer", "--head-lr-mult", "1", "a learning rate of the head", "remove it"),
    FlagIfOff(
        "data", "--data-impl", "mmap", "another format of corpora", "preprocess to .bin and .idx files"
    ),
    FlagIfOff(
        "data",
        "--dataloader-type",
        "single",
        "another order of samples",
        "remove it: a run reads the shuffled samples once, in order",
    ),
    FlagIfOff("data", "--vocab-extra-ids", "0", "extra tokens for spans", "remove it"),
    FlagIfOff(
        "training",
        "--fp8-recipe",
        "tensorwise",
        "scales of blocks",
        "remove it: --fp8 scales each tensor by its own maximum",
    ),
    FlagIfOff("training", "--rerun-mode", "disabled", "repeated iterations", "pass disabled"),
)

UNSUPPORTED = (
    UnsupportedFeature(
        "training",
        "this precision",
        "remove it; with --bf16 and --fp16 the loss is in fp32 and hidden states in 16 bits",
        """
        fp16-lm-cross-entropy fp32-residual-connection first-last-layers-bf16 te-precision-config-file
        disable-bf16-reduced-precision-matmul enable-autocast
        """,
        "fp4- kitchen- use-kitchen num-layers-at-start-in- num-layers-at-end-in-",
    ),
    UnsupportedFeature(
        "recompute",
        "recomputation's inputs alone in host memory",
        "remove it; --recompute-granularity full with --cpu-offload-activations and the number of a stage's "
        "layers moves them to the host",
        "checkpoint-in-cpu",
    ),
    UnsupportedFeature(
        "recompute",
        "activations of chosen modules in host memory",
        "remove it; --cpu-offload-activations moves those of a number of layers",
        "",
        "fine-grained-",
    ),
    UnsupportedFeature(
        "recompute",
        "weights in host memory",
        "remove it; --zero-stage 3 shards them over data-parallel ranks",
        "cpu-offloading-weights",
    ),
    UnsupportedFeature(
        "parallel",
        "context parallelism",
        "remove it",
        "cp-comm-type hierarchical-context-parallel-sizes hybrid-context-parallel",
    ),
    UnsupportedFeature(
        "parallel",
        "this way to shard weights and optimizer state",
        "remove it; --zero-stage 1, 2 or 3 shards over data-parallel ranks",
        """
        use-torch-fsdp2 use-megatron-fsdp use-custom-fsdp data-parallel-sharding-strategy
        outer-dp-sharding-strategy use-layer-wise-distributed-optimizer fsdp-double-buffer
        fsdp-db-use-persist-buf-on-alloc-fail fsdp-manual-registration
        """,
        "megatron-fsdp- torch-fsdp2- gtp-",
    ),
    UnsupportedFeature(
        "parallel",
        "this split of the pipeline",
        "remove it; see --pipeline-layers and --num-virtual-stages-per-pipeline-rank",
        "pipeline-model-parallel-layout microbatch-group-size-per-vp-stage",
    ),
    UnsupportedFeature(
        "parallel",
        "this way to survive a failure",
        "remove it; a run saves and exits on --exit-signals, and the launcher starts it again",
        "enable-ft-package calc-ft-timeouts adlr-autoresume adlr-autoresume-interval",
        "ft- inprocess- error-injection-",
    ),
    UnsupportedFeature(
        "model",
        "mixture of experts",
        _MOE,
        "num-experts overlap-moe-expert-parallel-comm",
        "moe- expert- ep- use-grouped-gemm-for-",
    ),
    UnsupportedFeature(
        "model",
        "another architecture",
        "remove it, or choose another --preset",
        "multi-latent-attention spec use-legacy-models encoder-num-layers decoder-num-layers",
        """
        mamba- hybrid- is-hybrid- linear- dsa- mhc- gdp- heterogeneous- retro- vision- swin- dino- img-
        biencoder- retriever- ict- mtp- q-lora- kv-lora- qk-head- qk-pos- v-head- experimental-attention-
        """,
    ),
    UnsupportedFeature(
        "model",
        "this model option",
        "remove it, or choose another --preset",
        """
        squared-relu quick-geglu apply-query-key-layer-scaling apply-residual-connection-post-layernorm
        rotary-interleaved qk-layernorm qk-l2-norm qk-clip add-qkv-bias openai-gelu glu-activation onnx-safe
        init-method-xavier-uniform use-rope-scaling rope-scaling-factor no-rope-freq window-size
        window-attn-skip-freq attention-output-gate no-position-embedding embedding-init-method-std use-mup
        """,
        "mup- yarn- relative-attention- activation-func- glu-linear-",
    ),
    UnsupportedFeature(
        "training",
        "another kind of training",
        "remove it: megalite pretrains; tools/evaluate.py evaluates",
        "sft skip-train perform-rl-step",
        "rl- grpo- langrl- sft-",
    ),
    UnsupportedFeature(
        "training",
        "an option of an inference server",
        "remove it; tools/generate.py generates text",
        "flash-decode",
        "inference-",
    ),
    UnsupportedFeature(
        "optimizer",
        "an older flag of an optimizer in host memory",
        "remove it, and pass --optimizer-cpu-offload",
        "cpu-optimizer cpu-torch-adam",
    ),
    UnsupportedFeature(
        "optimizer",
        "this optimizer option",
        "remove it",
        """
        sgd-momentum use-precision-aware-optimizer grad-norm-skip-threshold
        check-for-large-grads apply-wd-to-qk-layernorm decrease-batch-size-if-needed
        """,
        "muon- soap- lion- adaptive-muon- no-weight-decay-cond-",
    ),
    UnsupportedFeature(
        "data",
        "this option of fill-in-the-middle",
        "remove it: whole documents are split, and samples end with the tokenizer's end-of-document token",
        "fim-split-sample fim-fragment-rate fim-no-prefix fim-pad-token fim-eod-token",
    ),
    UnsupportedFeature(
        "data",
        "code of a tokenizer's author",
        "remove it: megalite runs no code from a tokenizer's folder",
        "trust-remote-code",
    ),
    UnsupportedFeature(
        "data",
        "this way to evaluate",
        "remove it; see --eval-interval, --eval-iters and --valid-data-path",
        """
        full-validation multiple-validation-sets validation-set-names eval-micro-batch-size
        eval-global-batch-size start-eval-at-iter
        """,
    ),
    UnsupportedFeature(
        "checkpoint",
        "another checkpoint format",
        "remove it: checkpoints are safetensors files that any layout loads; see --load and --save",
        "universal-checkpoint ckpt-convert-format ckpt-convert-save",
    ),
    UnsupportedFeature(
        "checkpoint",
        "this kind of non-persistent checkpoint",
        "remove it: each rank saves its own state to --non-persistent-local-ckpt-dir",
        "non-persistent-global-ckpt-dir non-persistent-local-ckpt-algo",
        "replication",
    ),
    UnsupportedFeature(
        "logging",
        "this log or profiler",
        "remove it; see --metrics-file, --tensorboard-dir, --profile-execution and --log-straggler-interval",
        """
        disable-straggler-on-startup straggler-ctrlr-port straggler-minmax-count codecarbon-dir log-energy
        log-progress log-memory-interval log-device-memory-used log-max-attention-logit config-logger-dir
        use-nsys-profiler nvtx-ranges pytorch-profiler-collect-chakra
        check-weight-hash-across-dp-replicas-interval wandb-entity
        """,
        "one-logger- otel- save-activations- save-dgrads- save-wgrads- logits-",
    ),
    UnsupportedFeature(
        "training",
        "Megatron's YAML file",
        "write the same settings to a file for --config: --print-config shows its form",
        "yaml-cfg",
    ),
)
