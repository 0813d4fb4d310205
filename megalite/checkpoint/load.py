"""Load a run from a checkpoint of any layout: the latest complete one, which all ranks agree on."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from megalite.checkpoint.compatibility import (
    check_compatibility,
    is_newly_untied,
    loads_optimizer,
    resumed_config,
)
from megalite.checkpoint.download import Download
from megalite.checkpoint.folder import LATEST, Listing, iterations_in, list_checkpoints, name_of
from megalite.checkpoint.full_tensors import OF_TRAINING
from megalite.checkpoint.manifest import (
    FIRST_WITH_BUFFERS,
    INDEX,
    RUN,
    DamagedCheckpoint,
    Manifest,
    OtherFormat,
    TensorBytes,
    damage_of,
    read_manifest,
)
from megalite.checkpoint.parameter_range import Tensors
from megalite.checkpoint.progress import CallbackStates, TrainingProgress, states_of
from megalite.checkpoint.stored_run import StoredRun
from megalite.checkpoint.tensor_files import bytes_of, read_tensors, targets_of
from megalite.config import CheckpointConfig, Config
from megalite.data.corpus_record import DataRecord
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.parameter_spec import ParameterShard
from megalite.utils.commands import command_name
from megalite.utils.errors import UserError, few
from megalite.utils.log import log

_MODEL, _STATE, _MAIN, _EMA = "model.", "optimizer.", ".main", "ema."
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
_SCALER = "optimizer.loss_scaler."
_NUM_STEPS = "optimizer.num_steps"
"""A tensor that every checkpoint with optimizer state has."""
_OUTPUT, _WORD = "output.weight", "embedding.word.weight"
_MAX_SHOWN = 3
_FOREIGN = {
    "latest_checkpointed_iteration.txt": "Megatron-LM's",
    "model.safetensors": "Hugging Face's",
    "model.safetensors.index.json": "Hugging Face's",
    ".metadata": "torch.distributed.checkpoint's",
}
"""Files that identify checkpoint folders of other programs."""


class _Finding(NamedTuple):
    """Problems that one rank found in a checkpoint.

    Attributes:
        text_problems: problems of text files, which every rank should find.
        file_problems: problems of the tensor files that this rank checked.
        digest: digest of the index, to detect that ranks see different folders.
    """

    text_problems: tuple[str, ...] = ()
    file_problems: tuple[str, ...] = ()
    digest: str | None = None
    is_other_format: bool = False


Needs = Callable[[Manifest], Mapping[str, Sequence[TensorBytes]]]
"""Returns what a rank needs of a checkpoint's files, by file; a `ValueError` if the checkpoint is damaged."""


def choose_checkpoint(
    folder: Path | StoredRun, topology: Topology, iteration: int | None = None, needs: Needs = lambda _: {}
) -> Manifest | None:
    """Return the checkpoint that `latest` names, or the newest complete one before it; every rank calls this.

    All its bytes have been read and verified; the ranks divide the files among themselves. From object
    storage, the ranks of a node have downloaded and verified what they need: close the manifest's `download`
    after reading it.

    Args:
        iteration: iteration to load; other checkpoints are then not considered.
        needs: returns what this rank needs.

    Returns:
        The manifest; None if the folder has no checkpoint.

    Raises:
        UserError: no checkpoint is complete, another version wrote it, the folder cannot be read, or ranks
            see different folders. Every rank raises it.
    """
    download: Download | None = None
    if isinstance(folder, StoredRun):
        listing, download = _begin_download(folder, iteration, topology)
        root = download.folder
    else:
        listing, root = _agreed_listing(folder, iteration, topology), folder
    for notice in listing.notices:
        log.warning("%s", notice)
    damaged: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(download or nullcontext())
        for name in listing.names:
            manifest, problems = _verified(root / name, download, topology)
            if manifest is not None and download is not None:
                problems = _download_problems(manifest, download, needs, topology)
            if manifest is not None and not problems:
                if damaged:
                    log.warning("checkpoint %s is loaded instead", manifest.title)
                stack.pop_all()
                return manifest
            damaged.append(f"{name}: {'; '.join(problems)}")
            if iteration is None and len(listing.names) > 1:
                log.warning("checkpoint %s/%s is damaged and skipped: %s", folder, name, "; ".join(problems))
    if not damaged:
        return None
    advice = "pass another --load-iteration" if iteration is not None else "load another"
    raise UserError(
        f"--load {folder} has no complete checkpoint to load ({' | '.join(damaged)}): {advice}, or remove "
        "--load"
    )


def _begin_download(run: StoredRun, iteration: int | None, topology: Topology) -> tuple[Listing, Download]:
    """Return what rank 0 finds in object storage, and the download that the ranks of a node share."""
    listing, token = Listing(), secrets.token_hex(8)
    with topology.agreed():
        if topology.rank == 0:
            listing = _stored_listing(run, iteration)
    listing, token = topology.world.object_of_first((listing, token), "a listing of object storage")
    with topology.agreed():
        try:
            return listing, Download(run.objects, run.stage, token)
        except OSError as error:
            raise UserError(
                f"files of --load {run} cannot be stored ({error.strerror}: {error.filename}): pass "
                "another --save-stage"
            ) from None


def _stored_listing(run: StoredRun, iteration: int | None) -> Listing:
    try:
        listing, found = run.listing(), run.iterations()
        if not listing.names and run.has_object(RUN):
            raise UserError(f"--load {run} is one checkpoint: pass the folder above it")
    except OSError as error:
        raise UserError(f"--load {run} cannot be read: {error.strerror}") from None
    return listing if iteration is None else _listing_of_one(str(run), found, iteration)


def _listing_of_one(folder: Path | str, found: Mapping[int, str], iteration: int) -> Listing:
    if iteration not in found:
        known = f"iterations {', '.join(map(str, found))}" if found else "none"
        raise UserError(f"--load {folder} has no checkpoint {name_of(iteration)}: it has {known}")
    return Listing((found[iteration],))


def _agreed_listing(folder: Path, iteration: int | None, topology: Topology) -> Listing:
    """Return what rank 0 finds in a folder that all ranks see."""
    with topology.agreed():
        listing = _listing(folder, iteration)
    listings = topology.world.gather_objects(listing, "listings of the folder")
    empty = [rank for rank, each in enumerate(listings) if not each.names]
    if 0 < len(empty) < len(listings):
        raise _different(folder, f"{_ranks(empty)} see no checkpoint")
    return listings[0]


def _listing(folder: Path, iteration: int | None) -> Listing:
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--load {folder} is not a folder: pass the one that --save wrote")
        if (folder / RUN).exists() and not (folder / LATEST).exists():
            raise UserError(
                f"--load {folder} is one checkpoint: pass the folder above it, {folder.absolute().parent}, "
                "and --load-iteration if it is not the latest"
            )
        found = iterations_in(folder)
        listing = list_checkpoints(folder)
        foreign = [name for name in _FOREIGN if (folder / name).exists()]
        if foreign and not listing.names:
            raise UserError(
                f"--load {folder} holds no checkpoint of megalite: {foreign[0]} is {_FOREIGN[foreign[0]]}; "
                f"try to convert it with {command_name('convert')}"
            )
    except OSError as error:
        raise UserError(f"--load {folder} cannot be read: {error.strerror}") from None
    return listing if iteration is None else _listing_of_one(folder, found, iteration)


def _verified(
    checkpoint: Path, download: Download | None, topology: Topology
) -> tuple[Manifest | None, list[str]]:
    """Return the manifest of a checkpoint that every rank finds complete, or None and its problems."""
    manifest: Manifest | None = None
    finding = _Finding()
    with topology.agreed():  # waits for the slowest reader
        try:
            if download is not None:
                download.fetch_texts(checkpoint.name)
            manifest = replace(read_manifest(checkpoint), download=download)
            if download is None:
                found = damage_of(manifest, manifest.files[topology.rank :: topology.world_size])
            else:  # what is downloaded is verified then
                found = download.problems_of(manifest) if topology.rank == 0 else []
            finding = _Finding((), tuple(found), manifest.digests[INDEX])
        except DamagedCheckpoint as error:
            finding = _Finding(error.problems, is_other_format=isinstance(error, OtherFormat))
        except OSError as error:  # of the store or the stage: an older checkpoint would fail too
            raise _unreadable(error) from None
    findings = topology.world.gather_objects(finding, "checks of the checkpoint")
    problems = _problems(findings)
    if all(each.is_other_format for each in findings):
        raise DamagedCheckpoint(checkpoint, problems)
    if not problems and len({each.digest for each in findings}) > 1:
        raise _different(checkpoint.parent, f"{checkpoint.name} differs from rank to rank")
    return (None if problems else manifest), problems


def _download_problems(manifest: Manifest, download: Download, needs: Needs, topology: Topology) -> list[str]:
    """Download what this rank needs, and return the problems that any rank finds in it."""
    with topology.agreed(), damage_named(manifest):
        wanted = needs(manifest)
    finding = _Finding()
    with topology.agreed():  # waits for the slowest
        try:
            download.fetch(manifest, wanted)
        except DamagedCheckpoint as error:
            finding = _Finding(file_problems=error.problems)
        except OSError as error:
            raise _unreadable(error) from None
    return _problems(topology.world.gather_objects(finding, "checks of the checkpoint"))


def _unreadable(error: OSError) -> UserError:
    return UserError(f"--load {error.filename} cannot be read: {error.strerror}")


def _problems(findings: Sequence[_Finding]) -> list[str]:
    """Return each problem of any rank once; problems of text files name the ranks if not all have them."""
    problems = []
    for problem in dict.fromkeys(problem for finding in findings for problem in finding.text_problems):
        ranks = [rank for rank, finding in enumerate(findings) if problem in finding.text_problems]
        problems.append(problem if len(ranks) == len(findings) else f"{problem} on {_ranks(ranks)}")
    problems += sorted({problem for finding in findings for problem in finding.file_problems})
    rest = len(problems) - _MAX_SHOWN
    return problems if rest <= 0 else [*problems[:_MAX_SHOWN], f"and {rest} more"]


def _ranks(ranks: Iterable[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}"


def _different(folder: Path, what: str) -> UserError:
    return UserError(
        f"--load {folder} is not the same on all ranks ({what}): pass a folder on a file system that all "
        "ranks share"
    )


@dataclass(frozen=True)
class LoadPlan:
    """Tensors and settings that a run loads from a checkpoint.

    Attributes:
        folder: path or URL of the checkpoint.
        progress: progress from which the run continues; iteration 0 if it loads only the weights.
        sources: names of the run's tensors to load, each with the name of the checkpoint's tensor.
        config: config of the run, with the checkpoint's learning-rate schedule if the run keeps it.
        notices: messages for the log.
        callbacks: states of the callbacks of the checkpoint's run; None if the run loads only the weights.
    """

    folder: str
    progress: TrainingProgress
    sources: Mapping[str, str]
    config: Config
    notices: tuple[str, ...] = ()
    callbacks: CallbackStates | None = None


def plan_load(
    manifest: Manifest,
    wanted: Tensors,
    config: Config,
    topology: Topology,
    data: DataRecord | None = None,
) -> LoadPlan:
    """Decide what to load.

    Args:
        wanted: all tensors of this rank, by name.

    Raises:
        UserError: the checkpoint belongs to another model or run, or lacks what the run needs.
        ValueError: run.json is damaged.
    """
    description, checkpoint = manifest.description, config.checkpoint
    progress = TrainingProgress.from_record(description["progress"])
    notices = check_compatibility(description, manifest.title, config, topology, data)
    _check_layers(manifest, config.model.num_layers)
    _check_state(manifest, checkpoint)
    missing = _missing_buffers(manifest, wanted, checkpoint)
    sources = _sources(manifest, {name: each for name, each in wanted.items() if name not in missing}, config)
    _check_plain_tensors(manifest, wanted)
    if missing:
        notices.append(
            f"{few(missing)} start at their initial values: checkpoint {manifest.title} has no such buffers"
        )
    if loads_optimizer(checkpoint):
        notices += _loss_scale_notices(manifest.tensors.keys(), wanted)
    elif not checkpoint.finetune:
        notices.append(
            f"the optimizer state of {manifest.title} is not loaded: the optimizer's moments start at zero"
        )
    notices += _average_notices(manifest.tensors.keys(), wanted, loads=loads_optimizer(checkpoint))
    if is_newly_untied(description, config):
        notices.append("the output weight starts as the word embedding: the checkpoint's model is tied")
    return LoadPlan(
        manifest.title,
        TrainingProgress() if checkpoint.finetune else progress,
        sources,
        resumed_config(description, config),
        tuple(notices),
        None if checkpoint.finetune else states_of(description),
    )


def _sources(manifest: Manifest, wanted: Tensors, config: Config) -> dict[str, str]:
    """Return the tensors to load, with their names in the checkpoint, or their own if it lacks them."""
    saved, description, loads = manifest.tensors, manifest.description, loads_optimizer(config.checkpoint)
    # Weights of another precision are read from the main weights, and rounded once.
    is_other_precision = description["model"].get("params_dtype") != config.model.params_dtype
    unties = is_newly_untied(description, config)
    sources = {}
    for name in wanted:
        is_main, is_weight, is_ema = name.endswith(_MAIN), name.startswith(_MODEL), name.startswith(_EMA)
        if name.startswith(_SCALER):  # a new scaler is created if the checkpoint has none
            is_loaded = loads and name in saved
        else:  # an average that is not loaded starts as the weights
            is_loaded = loads or is_main or is_weight or is_ema
        if not is_loaded:
            continue
        # The output weight and its state start as those of the word embedding if the checkpoint's is tied.
        own = name.replace(_OUTPUT, _WORD) if unties else name
        parameter = own.removeprefix(_MODEL).removeprefix(_STATE).removeprefix(_EMA).removesuffix(_MAIN)
        candidates = [own] if is_ema and loads else []  # the best first
        if is_main or is_ema or (is_weight and is_other_precision):
            candidates.append(f"{_STATE}{parameter}{_MAIN}")
        candidates.append(f"{_MODEL}{parameter}" if is_main or is_ema else own)
        sources[name] = next((each for each in candidates if each in saved), name)
    return sources


def _check_layers(manifest: Manifest, num_layers: int) -> None:
    """Raise an error if there are weights of more layers than in run.json: no rank would read them."""
    found = (_LAYER.match(name) for name in manifest.tensors)
    count = 1 + max((int(match[1]) for match in found if match), default=-1)
    if count > num_layers:
        raise ValueError(f"{RUN} has num_layers {num_layers}, but there are weights of {count} layers")


def _check_state(manifest: Manifest, checkpoint: CheckpointConfig) -> None:
    if _NUM_STEPS not in manifest.tensors and loads_optimizer(checkpoint):
        raise UserError(
            f"checkpoint {manifest.title} has no optimizer state (it was saved with --no-save-optim, or "
            "converted): pass --no-load-optim to continue with the optimizer's moments at zero, or "
            "--finetune to start a new run from its weights"
        )


def _missing_buffers(manifest: Manifest, wanted: Tensors, checkpoint: CheckpointConfig) -> list[str]:
    """Return the names of buffers that the checkpoint lacks, and that keep their initial values.

    A new run begins with them, and so does a run that resumes from a checkpoint of an earlier format. Buffers
    that only training reads also begin so in a run with other settings, or without optimizer state.

    Raises:
        UserError: the run resumes from a checkpoint that would have them: its model had no such buffers.
    """
    missing = sorted(
        name
        for name, each in wanted.items()
        if isinstance(each, ParameterShard) and each.is_buffer and each.tensor.numel()
        if _lacks(manifest, name, each)
    )
    can_begin = checkpoint.finetune or manifest.description["format"] < FIRST_WITH_BUFFERS
    has_other_updates = checkpoint.allow_settings_change or not loads_optimizer(checkpoint)
    lacking = [name for name in missing if not (has_other_updates and name.endswith(OF_TRAINING))]
    if lacking and not can_begin:
        raise UserError(
            f"checkpoint {manifest.title} lacks {few(lacking)}, which this model has: register constants "
            "with persistent=False, or pass --finetune to start a new run from its weights"
        )
    return missing


def _lacks(manifest: Manifest, name: str, buffer: ParameterShard) -> bool:
    """Return whether a checkpoint lacks a buffer, or has one of another length that only training reads."""
    pieces = manifest.tensors.get(name, ())
    shapes = {piece.range.full_shape for piece in pieces if piece.range is not None}
    return not pieces or (name.endswith(OF_TRAINING) and shapes != {buffer.spec.full_shape})


def _check_plain_tensors(manifest: Manifest, wanted: Tensors) -> None:
    """Raise an error if the checkpoint has a plain tensor that this version does not have."""
    plain = {
        name for name, pieces in manifest.tensors.items() if any(piece.range is None for piece in pieces)
    }
    known = {name for name, tensor in wanted.items() if isinstance(tensor, Tensor)} | {_NUM_STEPS}
    if unknown := sorted(name for name in plain - known if not name.startswith(_SCALER)):
        raise UserError(
            f"checkpoint {manifest.title} has tensors that this run does not have: {few(unknown)}; load "
            "another checkpoint, or remove --load"
        )


def _loss_scale_notices(saved: Collection[str], wanted: Tensors) -> list[str]:
    """Return notices of a loss scale that is new or no longer needed, because of fp16 or --loss-scale."""
    has = any(name.startswith(_SCALER) for name in saved)
    needs = any(name.startswith(_SCALER) for name in wanted)
    if needs and not has:
        return ["the checkpoint has no dynamic loss scale: it starts at --initial-loss-scale"]
    if has and not needs:
        return ["the checkpoint's dynamic loss scale is not used: this run has none"]
    return []


def _average_notices(saved: Collection[str], wanted: Tensors, *, loads: bool) -> list[str]:
    """Return notices of averages of the weights that begin anew or are no longer needed."""
    has = any(name.startswith(_EMA) for name in saved)
    needs = any(name.startswith(_EMA) for name in wanted)
    if needs and not (has and loads):
        return ["the average of --ema-decay starts at the loaded weights"]
    if has and loads and not needs:
        return ["the checkpoint's average of the weights is not used: this run has no --ema-decay"]
    return []


def load_checkpoint(
    folder: Path | StoredRun,
    tensors: Tensors,
    config: Config,
    topology: Topology,
    data: DataRecord | None = None,
) -> LoadPlan | None:
    """Copy the checkpoint of `load_iteration`, or the latest complete one, into this rank's tensors.

    Every rank must call this. All ranks return the same value or raise the same error.

    Args:
        tensors: all tensors of this rank, by name; tensors that the plan does not name do not change.
        data: identity of the run's data, to compare with the data of the checkpoint's run.

    Returns:
        The plan that was loaded; None if the folder has no checkpoint.

    Raises:
        UserError: the checkpoint belongs to another model or run, or none can be read.
    """
    plans: dict[str, LoadPlan] = {}

    def needs(manifest: Manifest) -> dict[str, list[TensorBytes]]:
        plans[manifest.title] = plan_load(manifest, tensors, config, topology, data)
        sources = plans[manifest.title].sources
        return bytes_of(manifest, targets_of({name: tensors[name] for name in sources}, topology, sources))

    manifest = choose_checkpoint(folder, topology, config.checkpoint.load_iteration, needs)
    if manifest is None:
        return None
    with topology.agreed(), manifest.download or nullcontext(), damage_named(manifest):
        plan = plans.get(manifest.title) or plan_load(manifest, tensors, config, topology, data)
        read_tensors(manifest, {name: tensors[name] for name in plan.sources}, topology, plan.sources)
        return plan


@contextmanager
def damage_named(manifest: Manifest) -> Iterator[None]:
    """Raise errors of a checkpoint's contents and of its files as `DamagedCheckpoint`."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(manifest.title, [str(error)]) from error
