"""Runs that all observers watch: they change nothing, and report in any layout what one rank reports.

Each layout trains once with all callbacks, and several tests look at this run.
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megalite.config import Config, DataConfig, LoggingConfig, OptimizerConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.local_ranks import run_ranks as run_new_ranks
from megalite.distributed.topology import Topology
from megalite.model.experts import Router, Routing
from megalite.observe.verify.layouts import Layout
from megalite.pipeline.schedules import SCHEDULES
from megalite.tensor_parallel.parameter_spec import ParameterShard, spec_of
from megalite.train.callbacks import default_callbacks
from megalite.train.callbacks.audit import Audit
from megalite.train.loop import Callback, TrainingLoop, train
from megalite.train.replicas import held_tensors
from megalite.train.stopping import RequeueNote, StopConditions, StopSignals
from megalite.train.telemetry import writers as writers_module
from megalite.train.telemetry.metrics import MetricsWriter
from megalite.train.telemetry.timers import Timers
from megalite.train.telemetry.writers import Writers
from megalite.train.train_step import StepResult
from megalite.train.trainer import Trainer, start_trainer
from megalite.utils.log import log
from tests.live_ranks import run_ranks
from tests.ranks.model.test_expert_dispatch import CONFIG as EXPERTS
from tests.trial_axis import TrialConfig, TwoDataAxesConfig

NUM_ITERATIONS, MICROBATCHES, CLIP = 2, 2, 0.05
MODEL = replace(
    EXPERTS,
    moe_layer_freq=(0, 1),
    vocab_size=61,
    make_vocab_size_divisible_by=7,  # to 63 rows, with tp=2 to 70
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
UNTIED = replace(
    MODEL,
    untie_embeddings_and_output_weights=True,
    # Positions that no sample has get no gradient.
    position_embedding_type="learned_absolute",
    max_position_embeddings=24,
)
GPT = replace(PRESETS["gpt-tiny"], vocab_size=64, seq_length=16, hidden_dropout=0.1)
MODELS = {
    "tied": replace(MODEL, untie_embeddings_and_output_weights=False, mtp_num_layers=1),
    "untied": UNTIED,
    "deep": replace(UNTIED, num_layers=4, moe_layer_freq=(0, 1, 0, 1)),
    "bert": replace(PRESETS["bert-tiny"], vocab_size=64, seq_length=16, num_layers=2),
    **{dtype: replace(GPT, params_dtype=dtype) for dtype in ("fp32", "bf16", "fp16")},
}
AUDITED = [
    ("dp1", "untied"),
    ("tp2+sp+full", "tied"),
    ("pp2dp2+zero3", "tied"),
    ("dp2+zero1+offload", "untied"),
    ("dp2+zero3", "untied"),
    ("dp4shard2+zero3", "untied"),
    ("a trial axis", "tied"),
    ("two data axes", "untied"),
    ("dp2+zero2", "bert"),
    ("pp2zbv", "bf16"),  # gradients are held in another order than in the microbatch alone
    ("dp2+zero1", "fp16"),
]
"""Layouts that are compared with runs without callbacks."""
SLOW = [("dp2+zero3", "bf16"), ("tp2+sp", "bf16"), ("tp2+sp", "fp16"), ("pp2zbv", "fp16")]
ALONE = [("tp2", "untied"), ("pp2", "tied"), ("dp2", "tied"), ("dp2+zero2", "tied")]
"""Slow layouts whose techniques others combine."""
OTHERS = [
    ("pp2v2", "deep"),
    ("pp2zb", "deep"),
    ("cp2+full", "untied"),
    ("dp2ep2+full", "tied"),
    ("tp2pp2", "tied"),
    ("tp2dp2+zero1", "untied"),
    ("tp2dp2+zero3", "tied"),
]
REPORTING = [row for row in (*AUDITED, *OTHERS) if row[1] in ("tied", "untied", "deep") and row[0] != "dp1"]
"""Layouts that are compared with the same run of one rank."""
AXES = {"a trial axis": (1, TrialConfig()), "two data axes": (4, TwoDataAxesConfig(data_parallel_size=2))}
"""The number of ranks with other samples, and the axes of layouts that have no name."""


def _config(name: str, kind: str, folder: Path) -> Config:
    """Return the config of a layout and a model, by their names."""
    model, is_bert = MODELS[kind], kind == "bert"
    logging = LoggingConfig(
        log_interval=NUM_ITERATIONS,
        log_params_norm=True,
        log_num_zeros_in_grad=True,
        log_straggler_interval=1,
        log_time_breakdown=name == "dp1",
        timing_log_level=2,
        tensorboard_dir=str(folder),
        log_optimizer_states_to_tensorboard=True,
        log_layer_grad_norms_interval=1,
        log_experts_interval=1,
        record_routing=str(folder / "experts") if model.has_experts else None,
        trace_pipeline=f"{NUM_ITERATIONS}:{NUM_ITERATIONS}",
        profile_modules=1 if name == "dp1" else None,
    )
    # In fp16 some gradients overflow, and the scale of the loss changes in each iteration.
    scale = {"initial_loss_scale": 2.0**19, "hysteresis": 1, "loss_scale_window": 1}
    config = Config(
        model=model,
        data=DataConfig(mock_data=True, eod_mask_loss=not is_bert, reset_position_ids=not is_bert),
        optimizer=OptimizerConfig(
            lr_decay_style="constant", clip_grad=CLIP, **(scale if kind == "fp16" else {})
        ),
        training=TrainingConfig(global_batch_size=8, train_iters=NUM_ITERATIONS, eval_iters=0),
        logging=logging,
    )
    layout = Layout() if name in AXES else Layout.parse(name)
    num_readers, parallel = AXES.get(name, (layout.size("dp"), config.parallel))
    training = replace(
        config.training,
        micro_batch_size=8 // MICROBATCHES // num_readers,
        audit_interval=1 if (name, kind) in (*AUDITED, *SLOW) else None,
    )
    config = replace(config, parallel=parallel, training=training)
    return config if name in AXES else layout.apply(config, 8)


class Dashboard(MetricsWriter):
    """What the reporting rank would write to TensorBoard, by what it is."""

    def __init__(self, *_: Any) -> None:
        self.kept: dict[str, Any] = {}

    def iteration(self, metrics: Any, times: Any) -> None:
        self.kept["figures"] = {
            **{"loss": metrics.lm_loss, "grad norm": metrics.grad_norm, "norm": metrics.params_norm},
            **metrics.other_losses,
        }
        self.kept["zeros"], self.kept["skipped"] = metrics.num_zeros, metrics.num_skipped

    def layer_norms(self, iteration: int, norms: Mapping[str, float]) -> None:
        self.kept["layer norms"] = dict(norms)

    def scalars(self, iteration: int, scalars: Mapping[str, float]) -> None:
        self.kept["optimizer norms"] = dict(scalars)

    def expert_use(self, loads: Any) -> None:
        self.kept["tokens"] = {name: each.tokens for name, each in loads.layers.items()}
        self.kept["entropies"] = {name: each.entropy for name, each in loads.layers.items()}


class Steps(Callback):
    """Losses of a run, its loss scales, and which updates it skipped."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.scales: list[float] = []
        self.skipped: list[bool] = []

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        self.losses.append(result.loss)
        self.scales.append(loop.trainer.optimizer.scaler.scale)
        self.skipped.append(result.skipped)


@dataclass
class Run:
    """What a rank has after a run.

    Attributes:
        state: losses, loss scales, skipped updates, and the bytes of the rank's tensors, by name.
        folder: of the run's files.
        lines: of its log.
        reported: by the reporting rank, see `Dashboard`.
        by_hand: the same of one rank, from full tensors and the outputs of routers.
    """

    state: dict[str, Any]
    folder: Path
    lines: list[str] = field(default_factory=list)
    reported: dict[str, Any] = field(default_factory=dict)
    by_hand: dict[str, Any] = field(default_factory=dict)


def _train(trainer: Trainer, callbacks: list[Callback]) -> dict[str, Any]:
    """Train to the end, and return the state."""
    config, topology = trainer.config, trainer.topology
    stop, steps = StopConditions(config.training, topology, StopSignals(RequeueNote(None))), Steps()
    train(trainer, stop, [*callbacks, steps])
    held = {
        name: each.tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, each in held_tensors(trainer).items()
    }
    return {**vars(steps), **held}


def _plain(topology: Topology, config: Config) -> Run:
    config = replace(config, training=replace(config.training, audit_interval=None), logging=LoggingConfig())
    with start_trainer(config, topology) as trainer:
        return Run(_train(trainer, []), Path())


def _observed(topology: Topology, config: Config) -> Run:
    lines: list[str] = []
    log.setLevel("INFO")
    log.addFilter(lambda record: lines.append(record.getMessage()) or True)  # type: ignore[func-returns-value]
    timers = Timers(topology.device, config.logging.timers_level, topology.observers)
    with (
        mock.patch.object(writers_module, "TensorBoardWriter", Dashboard),
        Writers(config.logging, topology, "") as writers,
        start_trainer(config, topology, timers) as trainer,
    ):
        tokens = _count_tokens(trainer) if topology.world_size == 1 else {}
        callbacks = default_callbacks(writers, config)
        num_observers = len(topology.observers)
        run = Run(_train(trainer, callbacks), Path(config.logging.tensorboard_dir or ""), lines)
        audits = [each for each in callbacks if isinstance(each, Audit)]
        assert all(each.state() == {"last_passed": NUM_ITERATIONS} for each in audits)
        assert len(topology.observers) == num_observers
        for dashboard in writers._dashboards:
            assert isinstance(dashboard, Dashboard)
            run.reported = dashboard.kept
        if topology.world_size == 1:
            run.by_hand = {"tokens": tokens, **_figures_of_full_tensors(trainer, run.reported)}
    return run


def _count_tokens(trainer: Trainer) -> dict[str, tuple[int, ...]]:
    """Return a dict for the tokens that each router sends to its experts in the last iteration."""
    found: dict[str, tuple[int, ...]] = {}

    def add(name: str, router: Router, _: object, routing: Routing) -> None:
        if trainer.progress.iteration == NUM_ITERATIONS - 1:
            # The last position of a sample has no later token.
            experts = routing.experts[:-1] if name.startswith("mtp") else routing.experts
            more = experts.flatten().bincount(minlength=router.num_experts).tolist()
            found[name] = tuple(map(sum, zip(found.get(name, [0] * len(more)), more, strict=True)))

    (chunk,) = trainer.chunks
    for name, module in chunk.named_modules():
        if isinstance(module, Router):
            module.register_forward_hook(partial(add, ".".join(name.split(".")[:2])))
    return found


def _figures_of_full_tensors(trainer: Trainer, reported: Mapping[str, Any]) -> dict[str, Any]:
    """Return norms and counts of one rank's tensors, without the padding of the vocabulary."""
    full: dict[str, list[torch.Tensor]] = {"weight": [], "gradient": [], "momentum": [], "variance": []}
    squares: dict[str, float] = {}
    state = trainer.optimizer.state()
    for name, weight in trainer.chunks[0].named_parameters():
        used = slice(spec_of(weight).used_shape[0])
        full["weight"].append(weight.detach()[used].flatten())
        gradient = trainer.optimizer.gradient(name)[used]
        full["gradient"].append(gradient.flatten())
        layer = ".".join(name.split(".")[:2]) if name.startswith("layers") else name.split(".")[0]
        part = layer if layer.startswith(("layers", "embedding")) else "head"
        squares[part] = squares.get(part, 0.0) + gradient.square().sum().item()
        for moment, of_adam in (("momentum", "exp_avg"), ("variance", "exp_avg_sq")):
            shard = state[f"{name}.{of_adam}"]
            assert isinstance(shard, ParameterShard)
            full[moment].append(shard.tensor.view(weight.shape)[used].flatten())
    whole = {kind: torch.cat(parts) for kind, parts in full.items()}
    zeros = int((whole.pop("gradient") == 0).sum())
    whole["variance_sqrt"] = whole["variance"].sqrt()
    norms = {
        f"optimizer/{kind}_{of_norm}": tensor.norm(p).item()
        for kind, tensor in whole.items()
        for of_norm, p in (("l2", 2), ("l1", 1), ("abs_max", math.inf))
    }
    clipped = reported["figures"]["grad norm"] / math.sqrt(sum(squares.values()))
    layers = {part: clipped * math.sqrt(square) for part, square in squares.items()}
    return {"zeros": zeros, "optimizer norms": norms, "layer norms": layers}


Observe = Callable[[str, str], list[Run]]


@pytest.fixture(scope="module")
def observe(tmp_path_factory: pytest.TempPathFactory) -> Observe:
    """Return a function that returns the runs of all ranks in a layout."""

    @functools.cache
    def observed(name: str, kind: str) -> list[Run]:
        return _on_ranks(_observed, name, _config(name, kind, tmp_path_factory.mktemp("run")))

    return observed


def _on_ranks(
    function: Callable[[Topology, Config], Run], name: str, config: Config, run: Any = run_ranks
) -> list[Run]:
    num_ranks = config.mesh.smallest_world if name in AXES else Layout.parse(name).world_size
    found: list[Run] = run(function, config.mesh, num_ranks, config)
    return found


@pytest.mark.parametrize(
    ("name", "kind"), [*AUDITED, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)]
)
def test_observers_change_nothing(name: str, kind: str, observe: Observe, tmp_path: Path) -> None:
    """Test it bit by bit, with audits that pass, also where a gradient of fp16 is infinite."""
    plain = _on_ranks(_plain, name, _config(name, kind, tmp_path))
    ranks = observe(name, kind)
    assert [each.state for each in ranks] == [each.state for each in plain]
    state, is_fp16 = ranks[-1].state, kind == "fp16"
    assert sum(state["skipped"]) == ranks[-1].reported["skipped"] == int(is_fp16)
    assert not is_fp16 or state["scales"] == [2.0 ** (18 if state["skipped"][0] else 20), 2.0**19]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_observers_change_nothing_with_compiled_layers(dtype: str, tmp_path: Path) -> None:
    """torch keeps what it has compiled: start new ranks."""
    config = _config("dp2", dtype, tmp_path)
    config = replace(config, training=replace(config.training, compile=True, audit_interval=1))
    observed, plain = (_on_ranks(each, "dp2", config, run_new_ranks) for each in (_observed, _plain))
    assert [each.state for each in observed] == [each.state for each in plain]


@pytest.mark.parametrize("kind", ["tied", "deep"])
def test_one_rank_reports_what_its_tensors_have(kind: str, observe: Observe) -> None:
    model, (run,) = MODELS[kind], observe("dp1", kind)
    assert any(line.startswith("modules") for line in run.lines), run.lines
    reported, by_hand = run.reported, run.by_hand
    assert reported["tokens"] == by_hand["tokens"]
    assert list(by_hand["tokens"]) == (["layers.1", "mtp.0"] if kind == "tied" else ["layers.1", "layers.3"])
    assert all(0.0 < each < math.log(6) for each in reported["entropies"].values())
    assert reported["zeros"] == by_hand["zeros"]
    assert reported["zeros"] >= 8 * model.hidden_size or kind == "tied"
    assert reported["optimizer norms"] == pytest.approx(by_hand["optimizer norms"], rel=1e-13)
    assert reported["figures"]["norm"] == pytest.approx(
        by_hand["optimizer norms"]["optimizer/weight_l2"], rel=1e-13
    )
    norms = reported["layer norms"]
    assert norms == pytest.approx(by_hand["layer norms"], rel=1e-12)
    assert list(norms) == ["embedding", *(f"layers.{layer}" for layer in range(model.num_layers)), "head"]
    assert math.hypot(*norms.values()) == pytest.approx(reported["figures"]["grad norm"], rel=1e-12)
    assert reported["figures"]["grad norm"] > CLIP
    assert min(norms.values()) > 0


@pytest.mark.parametrize(
    ("name", "kind"), [*REPORTING, *(pytest.param(*row, marks=pytest.mark.slow) for row in ALONE)]
)
def test_any_layout_reports_the_same(name: str, kind: str, observe: Observe) -> None:
    (one,), ranks = observe("dp1", kind), observe(name, kind)
    found, expected = ranks[-1].reported, one.reported
    for kind in ("tokens", "zeros"):
        assert found[kind] == expected[kind], kind
    for kind in ("figures", "optimizer norms", "layer norms", "entropies"):
        assert found[kind] == pytest.approx(expected[kind], rel=1e-10), kind


WAITS = {
    "pp": {"forward-recv", "backward-recv", "forward-send", "backward-send", "all-reduce"},
    "tp": {"all-reduce", "all-gather", "reduce-scatter"},
    "dp": {"all-reduce", "all-gather", "reduce-scatter"},
}
TRACED = [
    ("pp2", "tied"),
    ("pp2v2", "deep"),
    ("pp2zb", "deep"),
    ("tp2+sp+full", "tied"),
    ("dp2+zero1+offload", "untied"),
]
Event = Mapping[str, Any]


@pytest.mark.parametrize(("name", "kind"), TRACED)
def test_a_lane_for_each_rank_with_all_that_it_did(name: str, kind: str, observe: Observe) -> None:
    trace, run = _trace(name, kind, observe)
    breakdown, file = (line for line in run.lines if line.startswith("pipeline trace"))
    assert breakdown.startswith("pipeline trace of iteration 2: bubble ")
    assert file.startswith(f"pipeline trace: {run.folder}/pipeline_trace_2-2.json (2 lanes; clocks ")
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    lanes = [[event for event in events if event["tid"] == rank] for rank in range(2)]
    assert len(lanes[0]) + len(lanes[1]) == len(events)
    for rank, lane in enumerate(lanes):
        (iteration,) = (event for event in lane if event["cat"] == "iteration")
        assert iteration["name"] == "iteration 2"
        assert all(_is_inside(event, iteration) for event in lane)
        assert _actions(lane) == _scheduled(name, rank)
        assert _names(lane, "data") == {"batch-generator"}
        assert {"forward-backward", "optimizer", "optimizer-inner-step"} <= _names(lane, "part")
    shares = trace["otherData"]["verdict"]
    assert sum(shares.values()) == pytest.approx(1)
    assert all(0 <= share <= 1 for share in shares.values())
    axis = name[:2]
    assert {"pp wait", "tp wait", "dp wait"} & {event["cat"] for event in events} == {f"{axis} wait"}
    assert WAITS[axis] <= _names(events, f"{axis} wait")
    assert shares["bubble" if axis == "pp" else f"{axis} wait"] > 0


def test_waits_are_named(observe: Observe) -> None:
    """Test the waits of the last stage for hidden states, and of the first stage for gradients."""
    trace, _ = _trace("pp2", "tied", observe)
    names = [
        Counter(
            event["name"]
            for event in trace["traceEvents"]
            if event["ph"] == "X" and event["tid"] == rank and event["cat"] == "pp wait"
        )
        for rank in range(2)
    ]
    ends = {"all-reduce": 1, "embedding-grads-all-reduce": 1}
    assert names[0] == {"forward-send": MICROBATCHES, "backward-recv": MICROBATCHES, **ends}
    assert names[1] == {"backward-send": MICROBATCHES, "forward-recv": MICROBATCHES, **ends}


def _trace(name: str, kind: str, observe: Observe) -> tuple[dict[str, Any], Run]:
    """Return the trace, and the run of the rank that reports it."""
    run = observe(name, kind)[-1]
    return json.loads((run.folder / "pipeline_trace_2-2.json").read_text()), run


def _is_inside(event: Event, outer: Event) -> bool:
    start, end = outer["ts"], outer["ts"] + outer["dur"]
    slack = 1e-3  # microseconds: the sum of two rounded ones
    return start - slack <= event["ts"] and event["ts"] + event["dur"] <= end + slack


def _names(events: list[Event], category: str) -> set[str]:
    return {event["name"] for event in events if event["cat"] == category}


def _actions(events: list[Event]) -> Counter[tuple[str, int, int]]:
    return Counter(
        (event["cat"], event["args"]["microbatch"], event["args"]["chunk"])
        for event in events
        if "args" in event
    )


def _scheduled(name: str, rank: int) -> Counter[tuple[str, int, int]]:
    parallel = _config(name, "deep", Path()).parallel
    schedule = SCHEDULES[parallel.schedule]
    stages = schedule.stage_map(parallel.pp, parallel.num_virtual_stages_per_pipeline_rank)
    actions = schedule.train(rank if parallel.pp > 1 else 0, stages, MICROBATCHES)
    return Counter((action.kind.value, action.microbatch, action.chunk) for action in actions)
