"""Callbacks, which do all work of a run besides training."""

from __future__ import annotations

from megalite.config import Config
from megalite.train.callbacks.audit import Audit
from megalite.train.callbacks.metrics_logging import ExpertLogging, LayerNorms, MetricsLogging, OptimizerNorms
from megalite.train.callbacks.module_profile import ModuleProfile
from megalite.train.callbacks.nan_locator import NanLocation
from megalite.train.callbacks.periodic import Checkpointing, Evaluation, GarbageCollection
from megalite.train.callbacks.pipeline_trace import PipelineTracing
from megalite.train.callbacks.profiler import Profiler
from megalite.train.callbacks.recorded_routing import RoutingRecording, RoutingReplay
from megalite.train.health.straggler import Stragglers
from megalite.train.health.watchdog import HangWatchdog
from megalite.train.loop import Callback
from megalite.train.telemetry.writers import Writers


def default_callbacks(writers: Writers, config: Config) -> list[Callback]:
    """Return the callbacks of a run, in the order in which their hooks are called.

    Callbacks that measure an iteration come first. Checkpointing is last: it must know whether the run stops.
    """
    return [
        HangWatchdog(),
        *([RoutingReplay()] if config.training.replay_routing_from else []),  # before what runs a microbatch
        ModuleProfile(),  # runs microbatches, before the iteration's own are observed
        *([RoutingRecording()] if config.logging.record_routing else []),
        *([Audit()] if config.training.audit_interval else []),  # it has a state
        Profiler(),
        PipelineTracing(),
        Stragglers(),
        ExpertLogging(writers),
        NanLocation(),
        MetricsLogging(writers),
        LayerNorms(writers),
        OptimizerNorms(writers),
        GarbageCollection(),
        Evaluation(),
        Checkpointing(),
    ]
