"""The configuration of the optimizer and its schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megalite.config.option import (
    FRACTION,
    LOCAL_PATH,
    NONZERO_SHARE,
    NOT_NEGATIVE,
    OPEN_SHARE,
    POSITIVE,
    SIZE,
    AnyOf,
    Bound,
    Conflicts,
    OnResume,
    Range,
    Setting,
    flag_of,
    option,
    other_than,
)

OptimizerName = Literal["adam", "muon"]
MuonScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]
MuonCoefficients = Literal["simple", "quintic", "polar_express", "aol"]
WeightDecayStyle = Literal["constant", "linear", "cosine"]
LrDecayStyle = Literal["linear", "cosine", "constant", "inverse-square-root", "WSD"]
WsdDecayStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]
LrWarmupStyle = Literal["linear", "log"]
LrStepTiming = Literal["megatron", "deepspeed"]
ExpAvgDtype = Literal["fp32", "bf16", "fp8"]
ExpAvgSqDtype = Literal["fp32", "bf16"]


_MUON = Setting("optimizer", ("muon",))
_WSD = Setting("lr_decay_style", ("WSD",))
_DECAYING = Setting("lr_decay_style", ("linear", "cosine", "inverse-square-root", "WSD"))
_INCREASING = Setting("weight_decay_incr_style", ("linear", "cosine"))
_FP16 = Setting("params_dtype", ("fp16",), "only --fp16 has a loss scale")
_WARMUP = AnyOf(("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"), "there is no warm-up")
_OFFLOADS = AnyOf(
    ("optimizer_cpu_offload", "optimizer_nvme_offload"),
    "neither --optimizer-cpu-offload nor --optimizer-nvme-offload is set",
)
_PEAK = ", the peak: pass at most {most}"
_DYNAMIC = (_FP16, Setting("loss_scale", (None,)))

MAX_LOSS_SCALE = 2.0**64
"""Largest loss scale. While gradients are zero, a dynamic scale doubles until it is infinite; then every
later gradient is NaN, and the scale never decreases. Above this value, fp16 could only represent gradients
below 2**-48."""
_LOSS_SCALE = Range(lambda scale: 0 < scale <= MAX_LOSS_SCALE, "greater than 0 and at most 2**64")


@dataclass(frozen=True)
class OptimizerConfig:
    """Options of the optimizer, its schedules and the loss scale. Biases and norms are not decayed."""

    default_on_resume: ClassVar[OnResume] = OnResume.SETTING

    optimizer: OptimizerName = option("adam", choices={"dist_muon": "muon"})
    """Optimizer. adam is AdamW. muon is Muon for the matrices of layers, and AdamW for all other weights."""
    lr: float = option(3e-4, allowed=NOT_NEGATIVE, on_resume=OnResume.SCHEDULE)
    """Peak learning rate, reached at the end of the warm-up."""
    min_lr: float = option(0.0, allowed=NOT_NEGATIVE, on_resume=OnResume.SCHEDULE, only_with=_DECAYING)
    """Minimum learning rate, at the end of the decay and after it."""
    decoupled_lr: float | None = option(None, allowed=NOT_NEGATIVE, on_resume=OnResume.SCHEDULE)
    """Peak learning rate of the word embedding and the output layer. By default --lr."""
    decoupled_min_lr: float | None = option(
        None, allowed=NOT_NEGATIVE, on_resume=OnResume.SCHEDULE, only_with=_DECAYING
    )
    """With --decoupled-lr: minimum learning rate of the same layers. By default --min-lr."""
    lr_decay_style: LrDecayStyle = option("linear", on_resume=OnResume.SCHEDULE)
    """Decay of the learning rate from peak to minimum. WSD (warm-up, stable, decay) stays at the peak
    first."""
    lr_decay_iters: int | None = option(None, allowed=POSITIVE, on_resume=OnResume.SCHEDULE)
    """Iteration at which the decay ends. By default the last iteration."""
    lr_decay_samples: int | None = option(None, allowed=POSITIVE, on_resume=OnResume.SCHEDULE)
    """Consumed samples at which the decay ends, for a run with --train-samples. By default the whole run."""
    lr_warmup_iters: int = option(0, allowed=NOT_NEGATIVE, on_resume=OnResume.SCHEDULE)
    """Iterations of learning-rate warm-up."""
    lr_warmup_samples: int = option(0, allowed=NOT_NEGATIVE, on_resume=OnResume.SCHEDULE)
    """Samples of learning-rate warm-up, for a run with --train-samples."""
    lr_warmup_fraction: float | None = option(None, allowed=FRACTION, on_resume=OnResume.SCHEDULE)
    """Length of the warm-up as a fraction of the decay's iterations or samples."""
    lr_warmup_init: float = option(0.0, allowed=NOT_NEGATIVE, on_resume=OnResume.SCHEDULE, only_with=_WARMUP)
    """Learning rate at the start of the warm-up."""
    lr_warmup_style: LrWarmupStyle = option("linear", on_resume=OnResume.SCHEDULE, only_with=_WARMUP)
    """Shape of the warm-up. With log, the rate grows with the logarithm of the iteration or sample number."""
    lr_step_timing: LrStepTiming = option("megatron", on_resume=OnResume.SCHEDULE)
    """Which program's learning rate update n uses: the one Megatron-LM logs for iteration n, or the one
    DeepSpeed uses in update n, which lags by one or two updates."""
    lr_wsd_decay_style: WsdDecayStyle = option("exponential", on_resume=OnResume.SCHEDULE, only_with=_WSD)
    """With WSD: shape of the decay at the end."""
    lr_wsd_decay_iters: int | None = option(
        None, allowed=POSITIVE, on_resume=OnResume.SCHEDULE, only_with=_WSD
    )
    """With WSD: iterations of the decay at the end."""
    lr_wsd_decay_samples: int | None = option(
        None, allowed=POSITIVE, on_resume=OnResume.SCHEDULE, only_with=_WSD
    )
    """With WSD: samples of the decay at the end, for a run with --train-samples."""
    weight_decay: float = option(
        0.01,
        allowed=NOT_NEGATIVE,
        on_resume=OnResume.SCHEDULE,
        only_with=Setting("weight_decay_incr_style", ("constant",)),
    )
    """Weight decay, decoupled from the gradient and multiplied by the learning rate."""
    weight_decay_incr_style: WeightDecayStyle = option("constant", on_resume=OnResume.SCHEDULE)
    """Schedule of the weight decay: constant, or linear or cosine from a start to an end value."""
    start_weight_decay: float | None = option(None, allowed=NOT_NEGATIVE, on_resume=OnResume.SCHEDULE)
    """Weight decay at the start of the run, with a --weight-decay-incr-style other than constant."""
    end_weight_decay: float | None = option(None, allowed=NOT_NEGATIVE, on_resume=OnResume.SCHEDULE)
    """Weight decay at the end of the run, with a --weight-decay-incr-style other than constant."""
    weight_decay_incr_iters: int | None = option(
        None, allowed=POSITIVE, on_resume=OnResume.SCHEDULE, only_with=_INCREASING
    )
    """Iterations until the weight decay reaches its end value. By default the whole run."""
    weight_decay_incr_samples: int | None = option(
        None, allowed=POSITIVE, on_resume=OnResume.SCHEDULE, only_with=_INCREASING
    )
    """With --train-samples: samples until the weight decay reaches its end value. By default the whole
    run."""
    adam_beta1: float = option(0.9, allowed=FRACTION)
    """Adam's beta1: decay rate of the first moment."""
    adam_beta2: float = option(0.999, allowed=FRACTION)
    """Adam's beta2: decay rate of the second moment."""
    adam_eps: float = option(1e-8, allowed=POSITIVE)
    """Adam's epsilon, added to the root of the second moment."""
    exp_avg_dtype: ExpAvgDtype = option("fp32", on_resume=OnResume.LOGGED)
    """Dtype of AdamW's first moment between updates, rounded at random. With --params-dtype fp64, fp32 means
    fp64."""
    exp_avg_sq_dtype: ExpAvgSqDtype = option("fp32", on_resume=OnResume.LOGGED)
    """Dtype of AdamW's second moment between updates, rounded at random."""
    loss_scale: float | None = option(None, allowed=_LOSS_SCALE, only_with=_FP16)
    """With fp16: constant loss scale. By default the loss scale is dynamic."""
    initial_loss_scale: float = option(
        2.0**32, allowed=_LOSS_SCALE, on_resume=OnResume.LOGGED, only_with=_DYNAMIC
    )
    """With fp16: first value of the dynamic loss scale."""
    min_loss_scale: float = option(1.0, allowed=POSITIVE, only_with=_DYNAMIC)
    """With fp16: minimum of the dynamic loss scale."""
    loss_scale_window: int = option(1000, allowed=POSITIVE, only_with=_DYNAMIC)
    """With fp16: iterations without overflow after which the dynamic loss scale doubles, up to 2**64."""
    hysteresis: int = option(2, allowed=POSITIVE, only_with=_DYNAMIC)
    """With fp16: number of overflows before the dynamic loss scale is halved. Each further overflow halves it
    again, until the scale doubles."""
    muon_momentum: float = option(0.95, allowed=FRACTION, only_with=_MUON)
    """With --optimizer muon: decay rate of the momentum."""
    muon_nesterov: bool = option(False, "--muon-use-nesterov", only_with=_MUON)
    """With --optimizer muon: use Nesterov's momentum."""
    muon_scale_mode: MuonScaleMode = option("spectral", only_with=_MUON)
    """Factor of Muon's update of an m x n matrix, the root of: spectral max(m, n), unit_rms_norm m / n,
    shape_scaling max(1, m / n)."""
    muon_extra_scale_factor: float = option(1.0, allowed=POSITIVE, only_with=_MUON)
    """Further factor of Muon's updates. 0.2 with the spectral mode gives them the size of AdamW's."""
    muon_coefficient_type: MuonCoefficients = option("quintic", only_with=_MUON)
    """Coefficients of the Newton-Schulz iteration, by Megatron-LM's names."""
    muon_num_ns_steps: int = option(5, allowed=SIZE, only_with=_MUON)
    """Steps of the Newton-Schulz iteration."""
    muon_split_qkv: bool = option(True, sets={"--muon-no-split-qkv": False}, only_with=_MUON)
    """With --optimizer muon: queries, keys and values are three matrices, not one fused matrix."""
    clip_grad: float = option(1.0, allowed=NOT_NEGATIVE)
    """Clip the gradient to this global norm; 0 turns clipping off."""
    ema_decay: float | None = option(None, allowed=OPEN_SHARE, on_resume=OnResume.LOGGED)
    """Keep an exponential moving average of the weights with this decay rate, and evaluate it too."""
    optimizer_cpu_offload: bool = option(False, "--cpu-optimizer", on_resume=OnResume.FREE)
    """Keep AdamW's moments, and the fp32 main weights of a 16-bit model, in host memory, and update them
    there."""
    optimizer_nvme_offload: str | None = option(
        None, on_resume=OnResume.FREE, differs_between_ranks=True, allowed=LOCAL_PATH
    )
    """Keep the optimizer state in a file in this folder on a local disk, and read and write it in each
    update."""
    optimizer_offload_fraction: float = option(
        1.0, allowed=NONZERO_SHARE, on_resume=OnResume.FREE, only_with=_OFFLOADS
    )
    """Share of the optimizer state that the flags above offload, rounded to whole gradient buckets."""

    conflicts: ClassVar[Conflicts] = {
        **{
            f"{name}_{unit}": {
                f"train_{other}": (
                    f": a run is counted in iterations or in samples; pass {flag_of(f'{name}_{other}')}"
                )
            }
            for name in ("lr_decay", "lr_warmup", "lr_wsd_decay", "weight_decay_incr")
            for unit, other in (("iters", "samples"), ("samples", "iters"))
        },
        _OFFLOADS.fields: {
            (Setting("exp_avg_dtype", other_than("fp32")), Setting("exp_avg_sq_dtype", other_than("fp32"))): (
                ": offloaded moments are in fp32; remove one"
            ),
        },
        Setting("optimizer", ("muon",)): {
            _OFFLOADS.fields: (
                ": Muon's state is not offloaded; pass --zero-stage 1 to shard it instead, or --optimizer "
                "adam"
            ),
        },
        "optimizer_cpu_offload": {
            "optimizer_nvme_offload": ", which offloads the same state: pass only one of them",
        },
        "async_save": {
            "optimizer_nvme_offload": (
                ", which keeps the optimizer state out of host memory, where --async-save copies it: remove "
                "--async-save, or pass --optimizer-cpu-offload instead"
            ),
        },
        "mup_base_width": {
            Setting("muon_scale_mode", ("spectral",)): (
                ", whose updates grow with the width: pass --muon-scale-mode unit_rms_norm or shape_scaling"
            ),
        },
        "decoupled_min_lr": {
            Setting("decoupled_lr", (None,)): ": pass the peak rate too, or remove --decoupled-min-lr",
        },
        (Setting("start_weight_decay", other_than(None)), Setting("end_weight_decay", other_than(None))): {
            Setting("weight_decay_incr_style", ("constant",)): (
                ": pass --weight-decay, or --weight-decay-incr-style linear or cosine"
            ),
        },
        Setting("weight_decay_incr_style", other_than("constant")): {
            (Setting("start_weight_decay", (None,)), Setting("end_weight_decay", (None,))): ": pass it too",
        },
        Setting("lr_step_timing", ("deepspeed",)): {
            "train_samples": ": it counts updates, pass --train-iters",
            Setting("lr_decay_style", other_than("constant", "linear", "cosine")): (
                ": choose one of constant, linear, cosine"
            ),
        },
        Setting("lr_warmup_fraction", other_than(None)): {
            ("lr_warmup_iters", "lr_warmup_samples"): ": both set the warm-up; remove one",
        },
    }
    bounds: ClassVar[tuple[Bound, ...]] = (
        Bound("min_lr", "lr", _PEAK),
        Bound("lr_warmup_init", "lr", _PEAK),
        Bound("lr_warmup_init", "decoupled_lr", _PEAK),
        Bound("decoupled_min_lr", "decoupled_lr", _PEAK),
        Bound("min_lr", "decoupled_lr", f"{_PEAK}, or pass --decoupled-min-lr", unless="decoupled_min_lr"),
        Bound("start_weight_decay", "end_weight_decay", ": change one of them"),
        Bound("min_loss_scale", "initial_loss_scale", ": change one of them"),
        *(
            bound
            for unit in ("iters", "samples")
            for bound in (
                Bound(f"lr_wsd_decay_{unit}", f"lr_decay_{unit}"),
                Bound(f"lr_wsd_decay_{unit}", f"train_{unit}", unless=f"lr_decay_{unit}"),
            )
        ),
    )

    @property
    def offloads_optimizer(self) -> bool:
        """Return whether optimizer state is kept outside of the device."""
        return self.optimizer_cpu_offload or self.optimizer_nvme_offload is not None

    @property
    def updates_whole_matrices(self) -> bool:
        """Return whether an update of a matrix depends on all its elements, unlike AdamW's."""
        return self.optimizer == "muon"
