"""The configuration of activation recomputation and offload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megalite.config.model.feed_forward import HAS_EXPERTS
from megalite.config.option import (
    ABOVE_ONE,
    NOT_NEGATIVE,
    SIZE,
    Bound,
    Conflicts,
    OnResume,
    Range,
    Setting,
    option,
)

Granularity = Literal["full", "selective"]
Method = Literal["uniform", "block"]
Module = Literal["core_attn", "mla_up_proj", "mlp", "mlp_act", "layernorm"]
_FULL = Setting("recompute_granularity", ("full",))
_SAVES_INPUTS = (
    _FULL,
    Setting("tensor_model_parallel_size", ABOVE_ONE),
    Setting("sequence_parallel", (False,), "--sequence-parallel already shards what is saved"),
)


def _any_of(*modules: Module) -> Setting:
    """Return the setting that recomputes one of these modules."""
    return Setting("recompute_modules", Range(lambda found: bool({*modules} & {*found}), ""))


@dataclass(frozen=True)
class RecomputeConfig:
    """Activations that are recomputed in backward or offloaded to the host, to save memory.

    The run stays bitwise the same, except that --cross-entropy-chunks and --mlp-chunks change the summation
    order of weight gradients.
    """

    default_on_resume: ClassVar[OnResume] = OnResume.FREE

    recompute_granularity: Granularity | None = option(
        None,
        sets={
            "--recompute-activations": "selective",
            "--checkpoint-activations": "full",
            "--deepspeed-activation-checkpointing": "full",
        },
    )
    """Recompute whole layers (full) or parts of each layer (selective) in backward. By default recompute
    nothing."""
    recompute_method: Method = option("uniform", "--activations-checkpoint-method", only_with=_FULL)
    """Method of full recomputation. uniform: all layers, in groups that save their input; block: only the
    first layers of a stage."""
    recompute_num_layers: int = option(
        1, "--checkpoint-num-layers", "--activations-checkpoint-num-layers", allowed=SIZE, only_with=_FULL
    )
    """Number of layers per group (uniform), or number of layers that a stage recomputes (block)."""
    recompute_modules: tuple[Module, ...] = option(
        ("core_attn",),
        choices={"moe": "mlp"},
        missing={
            "moe_act": "remove it: experts always compute their activation again in backward",
            "shared_experts": "pass moe, which recomputes the shared expert with the others",
        },
        only_with=Setting("recompute_granularity", ("selective",)),
    )
    """Modules to recompute with selective recomputation: core attention (mla_up_proj: from latents on), the
    MLP or experts with their norm, the MLP's activation, or the norms."""
    distribute_saved_activations: bool = option(
        False,
        "--partition-activations",
        "--distribute-checkpointed-activations",
        only_with=_SAVES_INPUTS,
    )
    """Shard the layer inputs that full recomputation saves over tensor-parallel ranks. Backward gathers
    them."""
    cross_entropy_chunks: int = option(1, allowed=SIZE)
    """Compute logits and loss in this many chunks, and recompute each chunk in backward. This saves the
    memory of full logits."""
    mlp_chunks: int = option(1, "--mlp-chunks-for-training", allowed=SIZE)
    """Compute each MLP in this many chunks of the sequence, and recompute each chunk in backward. This saves
    the memory of its wide activations."""

    cpu_offload_activations: int = option(0, "--cpu-offloading-num-layers", allowed=NOT_NEGATIVE)
    """Keep the saved activations of this many first layers of each pipeline stage in host memory between
    forward and backward. A stage with fewer layers offloads all of them."""

    conflicts: ClassVar[Conflicts] = {
        _any_of("mlp_act"): {HAS_EXPERTS: ": mlp_act is a part of an MLP; pass mlp"},
        _any_of("layernorm", "mlp"): {
            (Setting("norm_position", ("output", "post")), "parallel_shared_norm"): (
                ", whose norms' outputs are kept for other blocks: pass core_attn or mlp_act, or "
                "--recompute-granularity full"
            ),
        },
        _any_of("mla_up_proj"): {Setting("multi_latent_attention", (False,)): ": pass core_attn instead"},
        _any_of("mlp", "mlp_act"): {
            Setting("mlp_chunks", ABOVE_ONE): (
                ", which recomputes the MLP: remove mlp and mlp_act from --recompute-modules"
            ),
        },
        Setting("mlp_chunks", ABOVE_ONE): {
            HAS_EXPERTS: (
                ": experts compute all their tokens at once; remove it, and pass --recompute-granularity "
                "selective with --recompute-modules mlp"
            ),
        },
    }
    bounds: ClassVar[tuple[Bound, ...]] = (
        Bound("recompute_num_layers", "num_layers", ": pass the layers of a group, or of a stage"),
    )

    def __post_init__(self) -> None:
        """Remove repeated modules: Megatron's `mlp moe` is mlp twice here."""
        object.__setattr__(self, "recompute_modules", tuple(dict.fromkeys(self.recompute_modules)))

    @property
    def modules(self) -> frozenset[Module]:
        """Return the parts of every layer that are recomputed; empty unless the granularity is selective."""
        chosen = self.recompute_modules if self.recompute_granularity == "selective" else ()
        return frozenset((*chosen, "core_attn") if "mla_up_proj" in chosen else chosen)

    def groups(self, num_layers: int) -> list[tuple[range, bool]]:
        """Return the groups of a stage's layers (counted from 0), and whether each group is fully recomputed.

        Layers that are not fully recomputed form groups of one.
        """
        if self.recompute_granularity != "full":
            return [(range(i, i + 1), False) for i in range(num_layers)]
        if self.recompute_method == "block":
            return [(range(i, i + 1), i < self.recompute_num_layers) for i in range(num_layers)]
        step = self.recompute_num_layers
        return [(range(i, min(i + step, num_layers)), True) for i in range(0, num_layers, step)]
