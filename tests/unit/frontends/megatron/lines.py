"""Command lines of users' scripts, unchanged."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, NamedTuple

import yaml

COURSE = """
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
      --num-layers 12 --hidden-size 768 --num-attention-heads 32 --seq-length 1024 --max-position-embeddings 1024
      --micro-batch-size 4 --global-batch-size 4 --train-iters 100 --vocab-file V.json --merge-file M.txt --init-method-std 0.006
      --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine
      --lr-decay-iters 800 --lr-warmup-fraction .01 --clip-grad 1.0 --weight-decay 1e-1 --exit-duration-in-mins 1190
      --log-interval 10 --save-interval 300 --eval-interval 1000 --eval-iters 10 --tensorboard-dir D --tensorboard-queue-size 1
      --log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard
      --profile-execution True --profile-name TP_PP --save CKPT --data-path PREFIX --data-impl mmap --split 949,50,1
      --distributed-backend nccl
"""  # noqa: E501

BLOOM = """
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 --num-layers 8 --hidden-size 14336
      --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --loss-scale 15 --save-interval 100
      --micro-batch-size 2 --global-batch-size 16 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --log-interval 1
      --eval-iters 40 --eval-interval 1000 --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
      --init-method-std 0.006 --bf16 --train-iters 100000 --data-impl mmap --checkpoint-activations --save C --load C
      --tensorboard-dir T --deepspeed --deepspeed_config ds_config.json --zero-stage 0 --deepspeed-activation-checkpointing
      --exit-interval 500 --optimizer adam --embed-layernorm --sync-tp-duplicated-parameters --seed 42
      --position-embedding-type alibi --tokenizer-type PretrainedFromHF --tokenizer-name-or-path NAME
      --abort-on-unmet-fused-kernel-constraints --data-path 0.033178301 ar_text_document 0.0112 ca_text_document
      --split 90,5,5 --adam-eps 1e-8 --pad-vocab-size-to 250880 --exit-duration-in-mins 5990
      --pp-partition-method 'type:transformer|embedding'
"""  # noqa: E501

BLOOM_176B_ADDS = """
    --train-samples 220_000_000 --lr-decay-samples 200_000_000 --lr-warmup-samples 183_105
      --rampup-batch-size 192 16 9_765_625 --kill-switch-path FILE --num-workers 2 --valid-num-workers 0
      --train-weighted-split-paths-path FILE --valid-weighted-split-paths-path FILE
"""

BLOOM_DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": 16,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 0},
    "bf16": {"enabled": True},
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}


class Script(NamedTuple):
    """Hold a command line of an example script, and its outcome."""

    program: str
    flags: list[str]
    outcome: dict[str, Any]


def example_scripts() -> dict[str, Script]:
    """Return the scripts of megatron_scripts.yaml, by the project and the path of the first of each entry."""
    text = (Path(__file__).parent / "megatron_scripts.yaml").read_text(encoding="utf-8")
    return {
        f"{project}/{entry['scripts'][0]}": Script(
            entry["program"],
            shlex.split(entry["flags"]),
            {key: entry[key] for key in ("refused", "errors", "warns") if key in entry},
        )
        for project, entries in yaml.safe_load(text).items()
        for entry in entries
    }
