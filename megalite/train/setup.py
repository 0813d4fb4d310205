"""Set up a run: its process, signals and outputs, the log lines that describe it, and how it resumes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch

from megalite import kernels
from megalite.checkpoint.download import make_stage
from megalite.checkpoint.folder import LATEST
from megalite.checkpoint.load import LoadPlan
from megalite.checkpoint.progress import CallbackStates
from megalite.checkpoint.stored_run import StoredRun, iterations_at
from megalite.config import CheckpointConfig, Config, OptimizerConfig, ParallelConfig, check_config, to_yaml
from megalite.config.fields import config_fields
from megalite.config.model.model_config import CONVENTION, padded_vocab_size
from megalite.config.option import flag_of
from megalite.config.training import EXPERT_NOTES
from megalite.distributed.agreement import code_record
from megalite.distributed.collectives import largest_of_all
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.optim.offload import OffloadBytes
from megalite.optim.weight_gathering import WeightGathering
from megalite.train.model_chunks import named_parameters, weight_gradient_fusion
from megalite.train.run_context import RunContext
from megalite.train.stopping import RequeueNote, StopSignals, stop_signals
from megalite.train.telemetry.writers import Writers
from megalite.train.trainer import Trainer
from megalite.utils.errors import UserError, counted
from megalite.utils.hardware.process_settings import bind_to_gpu, describe, describe_sharing, settings_for
from megalite.utils.log import configure_logging, log, log_notes
from megalite.utils.object_store import is_object_url
from megalite.utils.torch_versions import untested_warning


def prepare_process(config: Config, notices: Sequence[str], launch: Launch) -> None:
    """Set up logging, log notes and warn of an untested torch, and check the config for this world size.

    Raises:
        ConfigError: lists all mistakes; raised on every rank, before any process group starts.
    """
    configure_logging(launch.rank)
    check_config(config, launch.world_size)
    log_notes(notices)
    if (warning := untested_warning(torch.__version__)) is not None:
        log.warning("%s", warning)
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it
        torch.use_deterministic_algorithms(True)


def settings_of(config: Config) -> dict[str, str]:
    """Return the settings that must agree on every rank of a run: the config by flag, and the code."""
    values = config.values()
    names = [field.name for field in config_fields() if not field.declared.differs_between_ranks]
    return code_record() | {flag_of(name): str(values[name]) for name in names}


def bind_to_cores(parallel: ParallelConfig, device: torch.device) -> None:
    """Bind a GPU rank to the cores next to its GPU, before it allocates host memory and starts threads."""
    if device.type == "cuda" and parallel.numa_binding:
        log.info("CPU cores of rank 0: %s", bind_to_gpu(device))


def listen(config: Config, launch: Launch) -> AbstractContextManager[StopSignals]:
    """Listen for signals that end the run early; rank 0 writes the requeue note for a scheduler."""
    note = RequeueNote(config.checkpoint.run_folder if launch.rank == 0 else None)
    return stop_signals(config.training.exit_signals, note)


def open_writers(run: RunContext) -> Writers:
    """Open the run's outputs, before any work is done.

    Raises:
        UserError: an output cannot be written; raised on every rank.
    """
    config = run.config
    with run.topology.agreed():
        return Writers(config.logging, run.topology, to_yaml(config), config.checkpoint.run_folder, run.lease)


_NAMED = ("dp", "tp", "pp")
"""Axes that Megatron-LM names in an order and with words of its own."""


def startup_line(topology: Topology) -> str:
    """Return the line of the run's layout, in the format that parsers of Megatron-LM's logs read."""
    entries = {entry.name: entry for each in topology.meshes.values() for entry in each.mesh_spec.axes}
    sizes = {name: axis.size for each in topology.meshes.values() for name, axis in each.named.items()}
    more = [f", {entries[name].meaning} size: {size}" for name, size in sizes.items() if name not in _NAMED]
    return (
        f"using world size: {topology.world_size}, data-parallel-size: {topology.dp.size}, "
        f"tensor-model-parallel size: {topology.tp.size}, pipeline-model-parallel size: {topology.pp.size}"
        f"{''.join(more)}"
    )


def announce(trainer: Trainer) -> None:
    """Log the run's resolved settings: layout, kernels, batch, data and model size."""
    config, topology = trainer.config, trainer.topology
    log.info(startup_line(topology))
    described = kernels.describe(topology.device.type), trainer.epilogues
    log.info("kernels on %s: %s", topology.device, "; ".join(filter(None, described)))
    if topology.device.type == "cuda":
        log.info("CUDA: %s", describe(settings_for(config.mesh, config.parallel.tp)))
    if config.parallel.ranks_share_gpus and config.parallel.distributed_backend != "gloo":
        log.info("%s", describe_sharing(topology.device))
    if description := trainer.chunks[0].description:
        log.info("%s", description)
    log.info("weight gradients: %s", weight_gradient_fusion(config, topology).description)
    if topology.tp.size > 1:
        log.info("tensor-parallel collectives %s", trainer.chunks[0].context.overlap.description)
    if topology.replicas.size > 1:
        log.info(
            "between replicas: %s",
            describe_replication(config, topology.replicas.shard.size, topology.device.type),
        )
        if config.parallel.zero_stage_among(topology.replicas.shard.size) == 3:
            log.info("gathered weights: %s", describe_gathering(trainer.gathering, topology.pp.size))
    if topology.replicas.replicate is not None and topology.replicas.shard.size > 1:
        groups = topology.replicas.replicate.size, topology.replicas.shard.size
        log.info(
            "ZeRO %d shards within %d groups of %d neighbouring replicas", config.parallel.zero_stage, *groups
        )
    if (offload := trainer.optimizer.offload) is not None:
        log.info(
            "optimizer state of rank 0: %s",
            describe_offload(config.optimizer, offload.bytes, keeps_gradients=offload.gradients is not None),
        )
    if config.model.has_experts and config.model.moe_router_force_load_balancing:
        log.info("tokens go to random experts (--moe-router-force-load-balancing): routing is not learned")
    if config.training.fp8_format is not None:
        log.info("linear layers: %s", config.training.fp8_description)
        if config.model.has_experts and (note := EXPERT_NOTES.get(config.training.fp8_recipe)):
            log.info("experts: %s", note)
    if offloaded := config.recompute.cpu_offload_activations:
        log.info("activations of %d layers of each stage are in host memory until backward", offloaded)
    if config.training.compile:
        log.info("transformer layers: torch.compile compiles them when they first run")
    log.info(
        "vocabulary: %s tokens, padded to %d",
        config.model.vocab_size,
        padded_vocab_size(config.model, topology.tp.size),
    )
    if trainer.optimizer.averages is not None:
        log.info("weights are averaged after each update, with decay %g", config.optimizer.ema_decay)
    if trainer.saver.local is not None:
        trainer.saver.local.check_space(trainer.tensors())
    _log_batches(trainer)
    _log_datasets(trainer)
    if config.logging.log_throughput:
        log.info("TFLOP/s are %s", CONVENTION)
    num_local = sum(parameter.numel() for _, parameter in named_parameters(trainer.chunks))
    log.info("parameters on rank 0: %s", f"{num_local:,}")


def describe_replication(config: Config, num_shards: int, device_type: str) -> str:
    """Return when data-parallel ranks reduce gradients and gather weights, for the log.

    Args:
        num_shards: number of ranks that ZeRO shards over.
    """
    parallel = config.parallel
    zero_stage = parallel.zero_stage_among(num_shards)
    if zero_stage == 3:
        text = "weights are gathered before they are used, gradients are reduced during backward"
    else:
        text = f"gradients are reduced {'during' if parallel.overlap_grad_reduce else 'after'} backward"
        if zero_stage > 0:
            when = "during" if parallel.gathers_under_forward(device_type) else "before"
            text += f", weights are gathered {when} the next forward"
            if when == "before" and config.gathers_in_8_bits(num_shards):
                text += " (those in 8 bits during it)"
    return f"{text}, on a stream of high priority" if device_type == "cuda" else text


def describe_gathering(gathering: WeightGathering, pp: int) -> str:
    """Return when ZeRO stage 3 gathers and frees weights, and why, for the log."""
    if gathering.keeps_weights:
        text = "gathered once per iteration and kept until the last backward"
    else:
        text = "gathered for a layer's forward and again for its backward, in each microbatch"
        if pp > 1:
            text += "; embedding and output weights once per iteration"
    return f"{text} ({gathering.reason})"


def describe_offload(config: OptimizerConfig, size: OffloadBytes, *, keeps_gradients: bool) -> str:
    """Return where offloaded optimizer state is, for the log."""
    text = f"{size.host / 1e9:.3f} GB of host memory"
    if config.optimizer_nvme_offload is not None:
        text += f", {size.file / 1e9:.3f} GB in an unnamed file in {config.optimizer_nvme_offload}"
    elif keeps_gradients:
        text += ", gradients included"
    else:
        text += "; there is too little memory to copy gradients under backward"
    return f"{text}; the host updates it"


def _log_batches(trainer: Trainer) -> None:
    training = trainer.config.training
    log.info(
        "global batch: %s (data-parallel size %d x %s of %s)",
        counted(trainer.global_batch_size, "sample"),
        trainer.topology.sample_ranks.size,
        counted(trainer.num_microbatches, "microbatch", "es"),
        counted(training.micro_batch_size, "sample"),
    )
    if rampup := training.rampup_batch_size:
        log.info("global batch ramp-up: starts at %d samples and grows by %d, over %d samples", *rampup)
    if schedule := training.step_batch_size_schedule:
        log.info("global batch schedule: %s (tokens:samples)", " ".join(schedule))
    if schedule := training.seq_length_schedule:
        log.info("sequence lengths: %s (tokens:length); evaluation takes whole samples", " ".join(schedule))


def _log_datasets(trainer: Trainer) -> None:
    """Log how many samples of each dataset the run uses: a dataset holds whole epochs, often more."""
    config, dp = trainer.config, trainer.topology.sample_ranks.size
    num_iterations, eval_iters = config.num_iterations(dp), config.num_eval_iters(dp)
    num_trained = config.batch_size(dp).consumed_before(num_iterations + 1)
    num_evaluated = eval_iters * trainer.global_batch_size
    for name, num_samples in trainer.datasets.sizes():
        if name == "train":
            used = f"the run trains on {num_trained:,}"
            unit = f"{num_iterations:,} iteration{'s'[: num_iterations != 1]}"
        elif config.training.full_validation and name.startswith("valid"):
            used, unit = "each evaluation uses all", "--full-validation"
        else:
            used = f"each evaluation uses {min(num_evaluated, num_samples):,}"
            unit = f"--eval-iters {eval_iters}"
        log.info("%s dataset: %s of its %s samples (%s)", name, used, f"{num_samples:,}", unit)


def resume(trainer: Trainer, launch: Launch) -> CallbackStates | None:
    """Load the latest checkpoint of --load, if there is one; a restarted run prefers its own.

    Returns:
        The saved states of callbacks; None for a new run.

    Raises:
        UserError: --load holds no checkpoint, and is not the --save folder.
    """
    trainer.saver.upload_staged()
    topology = trainer.topology
    restarts = torch.tensor(launch.restarts, device=topology.device)  # each torchrun agent counts its own
    if largest_of_all(restarts, topology) and (own := _resume_own(trainer)) is not None:
        return own.callbacks
    folder = trainer.config.checkpoint.load
    if not folder:
        _warn_of_other_checkpoints(trainer)
        return None
    if (loaded := trainer.load()) is not None:
        iteration = trainer.progress.iteration
        if trainer.config.checkpoint.finetune:
            log.info("loaded only the weights from %s: the run starts at iteration 0", loaded.folder)
            _warn_of_other_checkpoints(trainer)
        else:
            log.info("resumed from %s at iteration %d", folder, iteration)
        if skipped := trainer.progress.num_skipped:
            log.info("so far the updates of %d iterations were skipped", skipped)
        if iteration >= trainer.config.num_iterations(trainer.topology.sample_ranks.size):
            flag = "--train-samples" if trainer.config.training.is_counted_in_samples else "--train-iters"
            log.warning("nothing is left to train: raise %s to continue", flag)
    elif trainer.config.checkpoint.loads_own:  # first start of a run that loads from its own --save folder
        log.info("note: no checkpoint in --load %s yet: training starts from new weights", folder)
    else:
        raise _no_checkpoint(folder)
    return None if loaded is None else loaded.callbacks


def check_checkpoint_folders(config: CheckpointConfig, launch: Launch, topology: Topology) -> None:
    """Refuse a --load folder without checkpoints, before datasets and model are built; a collective.

    If checkpoints are in object storage, it also creates this node's stage, before any other file is in it.

    Raises:
        UserError: the folder has no checkpoint, or the stage cannot be written; raised on every rank.
    """
    may_be_empty = config.loads_own or config.non_persistent_local_ckpt_dir is not None or launch.restarts
    with topology.agreed():
        for folder in filter(None, (config.load, config.save)):
            if run := StoredRun.at(folder, config.save_stage):
                try:
                    make_stage(run.stage)
                except OSError as error:
                    raise UserError(
                        f"{run.stage.parent} cannot be used ({error.strerror}): pass another --save-stage"
                    ) from None
        if config.load and not may_be_empty and topology.rank == 0:
            try:
                found = iterations_at(StoredRun.at(config.load) or Path(config.load))
            except OSError as error:
                raise UserError(f"{config.load} cannot be read: {error.strerror}") from None
            if not found:
                raise _no_checkpoint(config.load)


def _has_latest(folder: str) -> bool:
    run = StoredRun.at(folder)
    try:
        return run.has_object(LATEST) if run else (Path(folder) / LATEST).exists()
    except OSError:
        return False  # the first save reports it


def _no_checkpoint(folder: str) -> UserError:
    is_there = is_object_url(folder) or Path(folder).exists()
    there = "holds no checkpoint of megalite" if is_there else "does not exist"
    return UserError(f"--load {folder} {there}: pass the folder that --save wrote, or omit it")


def _resume_own(trainer: Trainer) -> LoadPlan | None:
    """Resume a restarted run from --save; its options describe the first start.

    Returns:
        What was loaded; None if there is no checkpoint yet, or the options load the run's own latest one.
    """
    config = trainer.config
    options = config.checkpoint
    loads_own_latest = options.loads_own and options.load_iteration is None and not options.finetune
    if options.save is None or loads_own_latest:
        return None
    own = replace(
        options, load=options.save, load_iteration=None, finetune=False, load_optim=options.save_optim
    )
    trainer.config = replace(config, checkpoint=own)
    if (loaded := trainer.load()) is None:
        trainer.config = config
        return None
    iteration = trainer.progress.iteration
    log.warning("restarted: resuming from --save %s at iteration %d", options.save, iteration)
    return loaded


def _warn_of_other_checkpoints(trainer: Trainer) -> None:
    save = trainer.config.checkpoint.save
    if save and trainer.topology.rank == 0 and _has_latest(save):
        log.warning(
            "--save %s holds checkpoints, but none of them is loaded: pass --load %s to resume from them, or "
            "another --save folder for a new run",
            save,
            save,
        )
