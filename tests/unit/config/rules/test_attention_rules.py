"""Heads that differ between layers, and keys that layers share: what fits, and what is refused."""

from __future__ import annotations

import pytest

from tests.command_line import mistakes_of

BASE = (
    "--preset llama-tiny --vocab-size 128 --mock-data --train-iters 2 --lr 1e-3 --num-layers 8 "
    "--global-batch-size 8"
)
WINDOWS = "--window-size 9,0 --window-attn-skip-freq 2"
SHARED = f"{WINDOWS} --num-kv-shared-layers 2"


def _problems(line: str, world_size: int = 1) -> list[str]:
    return mistakes_of(f"{BASE} {line}", world_size)


@pytest.mark.parametrize(
    ("line", "world_size"),
    [
        (f"{WINDOWS} --full-attention-kv-channels 32 --full-attention-query-groups 4 --tp 2", 2),
        (f"{SHARED} --pp 2", 2),  # layers 4 to 7
        (f"{SHARED} --pp 3 --pipeline-layers 2 2 4", 3),
        (f"{WINDOWS} --num-kv-shared-layers 4 --pp 2 --pipeline-layers 2 6", 2),
    ],
)
def test_what_fits(line: str, world_size: int) -> None:
    assert _problems(line, world_size) == []


@pytest.mark.parametrize(
    ("line", "world_size", "message"),
    [
        (
            "--full-attention-kv-channels 32",
            1,
            "--full-attention-kv-channels 32 without --window-attn-skip-freq: it distinguishes layers with",
        ),
        (
            "--keys-as-values full_attention --window-size 9,0",
            1,
            "--keys-as-values full_attention without --window-attn-skip-freq",
        ),
        (
            f"{WINDOWS} --full-attention-query-groups 3",
            1,
            "--num-attention-heads 4 is not divisible by --full-attention-query-groups 3: pass "
            "--full-attention-query-groups 2 or 4",
        ),
        (
            f"{WINDOWS} --full-attention-kv-channels 7",
            1,
            "even head size, not 7: pass --full-attention-kv-channels 8",
        ),
        (
            f"{WINDOWS} --full-attention-query-groups 1 --full-attention-kv-channels 2 --num-query-groups 4 "
            "--keys-as-values full_attention --tp 4",
            4,
            "--full-attention-query-groups 1 with --tp 4: the 10 rows of a group's",
        ),
        ("--num-kv-shared-layers 8", 1, "--num-kv-shared-layers 8 is not below --num-layers 8: pass fewer"),
        (
            f"{WINDOWS} --num-kv-shared-layers 7",
            1,
            "layer 1 has no layer before layer 1 with the same window and rotation",
        ),
        (  # no layer at all shares keys
            "--window-size 9,0 --window-attn-skip-freq [1]*6+[0]*2 --num-kv-shared-layers 2 --pp 2",
            2,
            "layer 6 has no layer before layer 6 with the same window and rotation",
        ),
        (f"{SHARED} --qk-clip", 1, "--qk-clip with --num-kv-shared-layers 2"),
        (f"{WINDOWS} --keys-as-values all --qk-clip", 1, "--qk-clip with --keys-as-values all"),
        (
            f"{WINDOWS} --full-attention-query-groups 1 --qk-clip",
            1,
            "--qk-clip with --full-attention-kv-channels or",
        ),
        (
            f"{SHARED} --kv-shared-ffn-hidden-size 97 --tp 2",
            2,
            "--kv-shared-ffn-hidden-size 97 is not divisible by --tp 2: use a multiple of it, such as 98",
        ),
        (
            f"{SHARED} --pp 4",
            4,
            "layers 4 to 7 share keys and values, and the last pipeline stage begins with layer 6: pass "
            "--pipeline-layers 2 1 1 4",
        ),
        (
            f"{WINDOWS} --num-kv-shared-layers 4 --pp 4",
            4,
            "layers 2 to 7 share keys and values, and the last pipeline stage begins with layer 6: use a "
            "smaller --pp",
        ),
    ],
)
def test_what_does_not_fit_is_refused(line: str, world_size: int, message: str) -> None:
    (found,) = _problems(line, world_size)
    assert message in found


@pytest.mark.parametrize("module", ["mlp", "layernorm"])
def test_a_shared_norm_is_not_recomputed(module: str) -> None:
    line = "--parallel-residual --parallel-shared-norm --recompute-granularity selective --recompute-modules "
    (found,) = _problems(line + module)
    assert f"--recompute-modules {module} with --parallel-shared-norm" in found
