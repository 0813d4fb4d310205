"""The features of Megatron-LM and Megatron-DeepSpeed that megalite does not have, with their flags."""

from __future__ import annotations

from typing import NamedTuple


class UnsupportedFeature(NamedTuple):
    """Describes a feature that megalite does not have.

    Attributes:
        topic: a key of `TOPICS`.
        what: the feature's name.
        fix: what to do instead.
        flags: the flags that request it, without their dashes.
        prefixes: prefixes of further flags that request it.
        of_experts: whether the flags change nothing in a dense model.
    """

    topic: str
    what: str
    fix: str
    flags: str
    prefixes: str = ""
    of_experts: bool = False


UNSUPPORTED = (
    UnsupportedFeature(
        "training",
        "this precision",
        "remove it; with --bf16 and --fp16 the loss is in fp32 and hidden states in 16 bits",
        """
        fp16-lm-cross-entropy fp32-residual-connection first-last-layers-bf16 te-precision-config-file
        disable-bf16-reduced-precision-matmul enable-autocast embedding-weights-in-fp32 output-logit-dtype
        fp8-quantizer-factory no-fp8-wgrad disable-fp8-wgrad fp8-output-proj reuse-grad-buf-for-mxfp8-param-ag
        ddp-reduce-scatter-with-fp32-accumulation ddp-param-name-patterns-for-fp32-local-accumulation
        """,
        "fp4- kitchen- use-kitchen num-layers-at-start-in- num-layers-at-end-in-",
    ),
    UnsupportedFeature(
        "training",
        "results that do not depend on the batch",
        "remove it; --deterministic makes results equal from run to run",
        "",
        "batch-invariant-",
    ),
    UnsupportedFeature(
        "recompute",
        "offloading of only the inputs of recomputation",
        "remove it; --recompute-granularity full with --cpu-offload-activations and the number of a stage's "
        "layers offloads them",
        "checkpoint-in-cpu",
    ),
    UnsupportedFeature(
        "recompute",
        "offloading the activations of chosen modules",
        "remove it; --cpu-offload-activations offloads the activations of a number of layers",
        """
        offload-modules min-offloaded-tensor-size delay-offload-until-cuda-graph
        delta-offload-bytes-across-pp-ranks activation-offload-fraction
        """,
        "fine-grained-",
    ),
    UnsupportedFeature(
        "recompute",
        "weights in host memory",
        "remove it; --zero-stage 3 shards them over data-parallel ranks",
        "cpu-offloading-weights",
    ),
    UnsupportedFeature(
        "recompute",
        "activations in parts",
        "remove it; --sequence-parallel, --recompute-granularity, --mlp-chunks and --cross-entropy-chunks "
        "save this memory",
        "scattered-embeddings split-transformers memory-centric-tiled-linear tile-factor",
    ),
    UnsupportedFeature(
        "parallel",
        "this kind of context parallelism",
        "remove it; --context-parallel-size with --cp-comm-type splits samples over ranks, and "
        "--dynamic-context-parallel assigns packed documents to them",
        """
        hybrid-context-parallel max-seqlen-per-dp-cp-rank
        force-ds-sequence-parallel
        """,
        "ds-sequence-parallel-fpdt",
    ),
    UnsupportedFeature(
        "parallel",
        "this way to shard weights and optimizer state",
        "remove it; --zero-stage 1, 2 or 3 shards over data-parallel ranks",
        """
        use-torch-fsdp2 use-layer-wise-distributed-optimizer use-layer-wise-param-layout
        tensor-parallel-num-weight-shards enable-full-sharding-in-hsdp suggested-communication-unit-size
        create-all-gather-group
        """,
        "megatron-fsdp- torch-fsdp2- gtp-",
    ),
    UnsupportedFeature(
        "parallel",
        "this split of the pipeline",
        "remove it; see --pipeline-layers and --num-virtual-stages-per-pipeline-rank",
        """
        pipeline-model-parallel-layout pipeline-model-parallel-split-rank standalone-embedding-stage
        microbatch-group-size-per-vp-stage microbatch-group-size-per-virtual-pipeline-stage
        """,
    ),
    UnsupportedFeature(
        "parallel",
        "this way to start or to survive a failure",
        "remove it; start with torchrun; a run saves and exits on --exit-signals, and the launcher starts it "
        "again",
        """
        enable-ft-package calc-ft-timeouts adlr-autoresume adlr-autoresume-interval lazy-mpu-init
        deepspeed-mpi deepscale deepscale-config distributed-timeout-seconds-after-init
        """,
        "ft- inprocess- error-injection- fault-injector-",
    ),
    UnsupportedFeature(
        "parallel", "ranks without a network", "pass --dry-run", "fake-process-group test-mode"
    ),
    UnsupportedFeature(
        "model",
        "overlapped messages of experts by this flag",
        "remove it, and pass --pipeline-schedule dualpipev",
        "overlap-moe-expert-parallel-comm",
        of_experts=True,
    ),
    UnsupportedFeature(
        "recompute",
        "an older flag for recomputed experts",
        "pass --recompute-granularity selective --recompute-modules moe",
        "moe-layer-recompute",
        of_experts=True,
    ),
    UnsupportedFeature(
        "parallel",
        "an older flag for experts split over tensor-parallel ranks",
        "pass --expert-tensor-parallel-size",
        "moe-extended-tp",
        of_experts=True,
    ),
    UnsupportedFeature(
        "model",
        "dropped tokens by this flag",
        "pass --moe-expert-capacity-factor",
        "moe-token-dropping",
        of_experts=True,
    ),
    UnsupportedFeature(
        "model",
        "this option of experts",
        "remove it; docs/experts.md lists the options",
        """
        num-experts-switch create-moe-param-group use-tutel topk mlp-type
        enable-expert-tensor-parallelism overlap-dispatch-backward-with-experts-wgrad
        save-tokens-per-expert-interval
        """,
        "moe- expert- ep-",
        of_experts=True,
    ),
    UnsupportedFeature(
        "model",
        "layers by the share of each kind",
        "remove it; pass --hybrid-override-pattern, with a letter for each layer",
        "hybrid-attention-ratio hybrid-mlp-ratio",
    ),
    UnsupportedFeature(
        "model",
        "another architecture",
        "remove it, or choose another --preset",
        """
        spec use-legacy-models encoder-num-layers decoder-num-layers decoder-seq-length
        encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size enable-mhc-connections
        use-fused-weighted-squared-relu
        """,
        """
        mamba- dsa- mhc- mla- gdp- heterogeneous- retro- mtp-
        """,
    ),
    UnsupportedFeature(
        "model",
        "images, audio or retrieval",
        "remove it: megalite trains on text alone",
        """
        num-classes num-channels patch-dim classes-fraction data-per-class-fraction mask-type
        mask-factor iter-per-epoch bert-load titles-data-path query-in-block-prob use-one-sent-docs
        evidence-data-path block-data-path embedding-path indexer-batch-size indexer-log-interval
        report-topk-accuracies output-bert-embeddings bert-embedder-type mrope-section freeze-LM freeze-ViT
        language-model-type language-model-checkpoint tokenizer-prompt-format special-tokens image-tag-type
        pixel-shuffle prompt-path recompute-vision force-system-message
        allow-missing-vision-projection-checkpoint disable-vision-class-token dataloader-save
        dataloader-seq-length max-num-tiles num-frames packing-seq-length total-seq-length
        use-area-weighted-aspect-ratio use-loss-scaling use-te use-thumbnail use-tile-tags use-tiling
        dataset-provider model-provider hf-assign-unused-tokens
        """,
        "vision- swin- dino- img- biencoder- retriever- ict- faiss- audio- image- video-",
    ),
    UnsupportedFeature(
        "model",
        "a gated activation other than SwiGLU, or its width",
        "pass --swiglu, and --ffn-hidden-size (by default 4 x --hidden-size in Megatron-DeepSpeed)",
        "glu-activation",
    ),
    UnsupportedFeature(
        "model",
        "this model option",
        "remove it, or choose another --preset",
        """
        apply-query-key-layer-scaling apply-residual-connection-post-layernorm
        qk-l2-norm openai-gelu onnx-safe
        init-method-xavier-uniform
        embedding-init-method-std mup
        data-parallel-random-init freeze-all-layers
        """,
        """
        mup-input- mup-output- mup-attn-mult mup-width- yarn- relative-attention- activation-func-fp8-
        """,
    ),
    UnsupportedFeature(
        "training",
        "another kind of training",
        "remove it: megalite pretrains and fine-tunes (--sft); tools/evaluate.py evaluates",
        """
        skip-train no-train perform-rl-step refit-method loss-on-targets-only norm-target-loss
        reweight-loss-based-on-position-frequency noise-density mean-noise-span-length bitfit chat-template
        data-path2 sft-tokenizer-prompt-format sft-mock-dataset-config-json
        """,
        "rl- grpo- langrl-",
    ),
    UnsupportedFeature(
        "training",
        "distillation, pruning or quantization",
        "remove it: megalite pretrains, and tools/convert_checkpoint.py writes Hugging Face's format",
        """
        kd mos load-teacher reset-iteration num-layers-teacher num-experts-teacher hidden-size-teacher
        num-attention-heads-teacher load-model-opt-format enable-gpt-oss
        """,
        "kd- logits- export- modelopt-",
    ),
    UnsupportedFeature(
        "training",
        "DeepSpeed's data efficiency",
        "remove it; --step-batch-size-schedule and --rampup-batch-size begin with small batches, and "
        "--seq-length-schedule with short sequences",
        """
        random-ltd train-data-exact-num-epochs return-data-index train-idx-path train-desc-path
        train-doc-idx-path train-sample-idx-path train-shuffle-idx-path repeated-dataloader
        phase-transition-iterations
        """,
        "data-efficiency-",
    ),
    UnsupportedFeature(
        "training",
        "an option of an inference server",
        "remove it; tools/generate.py generates text",
        """
        flash-decode inference ds-inference max-tokens-to-oom use-legacy-static-engine decode-only-cuda-graphs
        enable-chunked-prefill disable-chunked-prefill num-speculative-tokens
        use-same-sampling-seed-across-dp-ranks initialize-socket-comms nccl-all-reduce-for-prefill
        mlp-chunks-for-prefill
        """,
        "inference-",
    ),
    UnsupportedFeature(
        "optimizer",
        "this optimizer option",
        "remove it",
        """
        sgd-momentum use-precision-aware-optimizer grad-norm-skip-threshold check-for-large-grads
        apply-wd-to-qk-layernorm decrease-batch-size-if-needed use-bnb-optimizer dump-param-to-param-group-map
        """,
        "soap- lion- adaptive-muon- no-weight-decay-cond-",
    ),
    UnsupportedFeature(
        "optimizer",
        "moving state to host memory between updates",
        "remove it, and pass --optimizer-cpu-offload",
        "offload-optimizer-states",
    ),
    UnsupportedFeature(
        "data",
        "this option of fill-in-the-middle",
        "remove it: whole documents are split, and samples end with the tokenizer's end-of-document token",
        "fim-split-sample fim-fragment-rate fim-no-prefix fim-pad-token fim-eod-token",
    ),
    UnsupportedFeature(
        "data",
        "running code from a tokenizer's folder",
        "remove it: megalite runs no code from a tokenizer's folder",
        "trust-remote-code",
    ),
    UnsupportedFeature(
        "data",
        "this option of a tokenizer",
        "remove it; a tokenizer.json (--tokenizer-model) holds a tokenizer with all its options",
        """
        tokenizer-metadata tokenizer-special-tokens tiktoken-special-tokens null-tokenizer-eod-id
        null-tokenizer-pad-id
        """,
    ),
    UnsupportedFeature(
        "data",
        "a vocabulary without padding",
        "pass --make-vocab-size-divisible-by 1, or --pad-vocab-size-to",
        "no-pad-vocab-size disable-pad-vocab-size",
    ),
    UnsupportedFeature(
        "data",
        "this cache of object storage, or these weights",
        "remove it; see --data-cache-path and --data-path",
        "object-storage-cache-path s3-cache-path enable-msc msc renormalize-blend-weights",
    ),
    UnsupportedFeature(
        "data",
        "this mask between documents",
        "remove it, and pass --reset-attention-mask",
        "dataloader-inter-document-masking",
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
        """
        ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format save-params-interval
        """,
    ),
    UnsupportedFeature(
        "checkpoint",
        "this way to load",
        "remove it; see --load, --load-iteration, --finetune and --override-opt-param-scheduler",
        """
        pretrained-checkpoint load-tag override-ckpt-iteration load-main-params-from-ckpt no-load-lr-state
        use-mp-args-from-checkpoint-args reset-progress exit-on-missing-checkpoint
        """,
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
        use-nsys-profiler nvtx-ranges pytorch-profiler-collect-chakra gpu-sniff-test-interval
        wandb-entity log-path enable-one-logger
        run-workload-inspector-server result-rejected-tracker-filename record-shapes
        """,
        "one-logger- otel- save-activations- save-dgrads- save-wgrads- app-tag- flight-recorder-",
    ),
    UnsupportedFeature(
        "logging",
        "Megatron-DeepSpeed's profiled steps",
        "pass --profile-step-start and --profile-step-end",
        "profile-steps",
    ),
    UnsupportedFeature(
        "training",
        "Megatron's YAML file",
        "write the same settings to a file for --config: --print-config shows its form",
        "yaml-cfg",
    ),
    UnsupportedFeature(
        "training", "a flag that Megatron refuses too", "pass --micro-batch-size", "batch-size"
    ),
    UnsupportedFeature(
        "parallel",
        "a flag that Megatron refuses too",
        "pass --tensor-model-parallel-size",
        "model-parallel-size",
    ),
    UnsupportedFeature(
        "optimizer", "a flag that Megatron refuses too", "pass --lr-warmup-fraction", "warmup"
    ),
    UnsupportedFeature("optimizer", "an older name", "pass --min-loss-scale", "min-scale"),
)
