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
        "this precision",
        "remove it; with --bf16 and --fp16 the loss is in fp32 and hidden states in 16 bits",
        """
        fp16-lm-cross-entropy fp32-residual-connection
        """,
    ),
    Future(
        "activations in the host's memory",
        "remove it, and see --recompute-granularity",
        """
        checkpoint-in-cpu
        """,
    ),
    Future(
        "context parallelism",
        "remove it",
        """
        context-parallel-size cp-comm-type
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
        "an optimizer in host memory",
        "remove it; --zero-stage 1 shares the state out among data-parallel ranks",
        """
        cpu-optimizer cpu-torch-adam
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
        sgd-momentum decoupled-lr
        """,
    ),
    Future(
        "another format of checkpoints",
        "remove it: checkpoints are safetensors files that any layout loads; see --load and --save",
        """
        ckpt-format dist-ckpt-format universal-checkpoint
        """,
    ),
    Future(
        "this kind of non-persistent checkpoint",
        "remove it: each rank saves for itself, to --non-persistent-local-ckpt-dir",
        """
        non-persistent-global-ckpt-dir non-persistent-local-ckpt-algo
        """,
    ),
    Future(
        "this log or profile",
        "remove it; see --metrics-file, --tensorboard-dir, --profile-execution and --log-straggler-interval",
        """
        disable-straggler-on-startup straggler-ctrlr-port straggler-minmax-count codecarbon-dir log-level
        """,
    ),
)
"""A feature that comes in takes its flags out of here."""
