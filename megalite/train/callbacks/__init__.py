"""Callbacks, which do all work of a run besides training."""

from __future__ import annotations

from megalite.config import Config
from megalite.train.callbacks.audit import Audit
from megalite.train.callbacks.metrics_logging import (
    ExpertLogging,
    Goodput,
    LayerNorms,
    MetricsLogging,
    OptimizerNorms,
)
from megalite.train.callbacks.module_profile import ModuleProfile
from megalite.train.callbacks.nan_locator import NanLocation
from megalite.train.callbacks.profiler import Profiler
from megalite.train.callbacks.recorded_routing import RoutingRecording, RoutingReplay
from megalite.train.callbacks.straggler import Stragglers
from megalite.train.callbacks.watchdog import HangWatchdog
from megalite.train.loop import Callback, Checkpointing, Evaluation, GarbageCollection
from megalite.train.telemetry.writers import Writers
from megalite.train.tracing import PipelineTracing


def default_callbacks(writers: Writers, config: Config) -> list[Callback]:
    """Return the callbacks of a run, in the order in which their hooks are called.

    Callbacks that measure an iteration come first. Checkpointing is last: it must know whether the run stops.
    """
    logging, training = config.logging, config.training
    logs_norms = logging.log_optimizer_states_to_tensorboard and logging.has_dashboards
    profiles = logging.profile or logging.profile_execution or logging.record_memory_history
    return [
        Goodput(writers),
        HangWatchdog(),
        *([RoutingReplay()] if training.replay_routing_from else []),  # before what runs a microbatch
        *([ModuleProfile()] if logging.profile_modules else []),  # before the iteration's own are observed
        *([RoutingRecording()] if logging.record_routing else []),
        *([Audit()] if training.audit_interval else []),
        *([Profiler()] if profiles else []),
        *([PipelineTracing()] if logging.traced_iterations else []),
        *([Stragglers()] if logging.log_straggler_interval else []),
        *([ExpertLogging(writers)] if config.model.has_experts else []),
        NanLocation(),
        MetricsLogging(writers),
        *([LayerNorms(writers)] if logging.log_layer_grad_norms_interval else []),
        *([OptimizerNorms(writers)] if logs_norms else []),
        *([GarbageCollection()] if training.manual_gc else []),
        Evaluation(),
        Checkpointing(),
    ]
