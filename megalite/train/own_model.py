"""Check a program's own model: its stage, its results, and whether its layout was verified.

A record beside the program's file says that the model was verified in layouts that cut weights and samples.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config import ParallelConfig
from megalite.data.microbatch import LM_LOSS, LossTerm, WithTerms
from megalite.distributed.axes import MODEL
from megalite.distributed.topology import Topology
from megalite.model.stage import Stage, StageProvider, is_own_model, provider_name
from megalite.model.transformer_stage import TransformerStage
from megalite.tensor_parallel.parameter_spec import ParameterShard, spec_of
from megalite.tensor_parallel.placement import Box
from megalite.train.run_context import RunContext
from megalite.utils.errors import UserError, few, first_line, kind_of
from megalite.utils.log import log


def check_stage(stage: Any, provider: StageProvider) -> None:
    """Check a stage that a model provider has built.

    Raises:
        UserError: it is not a stage, or has frozen parameters, or ignores muP, or names the terms of its loss
            wrongly.
    """
    if not isinstance(stage, Stage):
        raise UserError(
            f"{provider_name(provider)} returns {kind_of(stage)}: return the Stage that it builds"
        )
    if frozen := [name for name, weight in stage.named_parameters() if not weight.requires_grad]:
        raise UserError(
            f"{few(frozen)} of {type(stage).__name__}: requires_grad is False, and every parameter is "
            "trained: use register_buffer(…, persistent=False) for constants"
        )
    matrices = [spec for spec in map(spec_of, stage.parameters()) if spec.is_matrix]
    is_scaled = any(spec.width_ratio != 1.0 for spec in matrices)
    if stage.config.width_ratio != 1.0 and matrices and not is_scaled:
        raise UserError(
            f"--mup-base-width {stage.config.mup_base_width} has no effect on {type(stage).__name__}: pass "
            "width_ratio=config.width_ratio to its linear layers, or remove the flag"
        )
    if stage.config.z_loss_coeff > 0.0:
        _check_z_loss(stage)
    if stage.config.mtp_num_layers and type(stage).losses is not TransformerStage.losses:
        raise UserError(
            f"--mtp-num-layers {stage.config.mtp_num_layers} with {type(stage).__name__}, whose losses have "
            "no terms of its modules: derive the stage from GPT and keep its losses, or remove the flag"
        )
    names = stage.loss_names
    if LM_LOSS not in names or not all(name.endswith("_loss") for name in names):
        raise UserError(
            f"loss_names of {type(stage).__name__} is {names}: name all terms of the loss, the first "
            f"'{LM_LOSS}', and end each name in _loss"
        )


def _check_z_loss(stage: Stage) -> None:
    """Check that the stage has the losses of one of megalite's classes, which add the z-loss."""
    base = next(each for each in type(stage).__mro__ if each.__module__.startswith("megalite."))
    for name in ("losses", "losses_of"):
        if getattr(type(stage), name) is not getattr(base, name):
            raise UserError(
                f"--z-loss-coeff {stage.config.z_loss_coeff:g} with {type(stage).__name__}, whose own "
                f"{name} does not add it: remove it, or add the term yourself (docs/python_api.md)"
            )


_Findings = tuple[list[str], float, dict[str, tuple[Box, float, float]]]
"""Unreached parameters, loss and fingerprints of buffers on one rank."""


def check_first_iteration(
    unreached: list[str], loss: float, buffers: Mapping[str, ParameterShard], topology: Topology
) -> None:
    """Check a model of your own after its first whole iteration; a collective.

    Args:
        unreached: parameters that backward has not reached on this rank; a warning names them.
        loss: loss of the iteration, on this rank.
        buffers: buffers that checkpoints hold, on this rank.

    Raises:
        UserError: the loss differs between tensor-parallel ranks, or a buffer between ranks that hold the
            same elements; on every rank.
    """
    mine: _Findings = unreached, loss, {name: _fingerprint(each, topology) for name, each in buffers.items()}
    everywhere = topology.world.gather_objects(mine, "checks of the model")
    names = sorted({name for each, *_ in everywhere for name in each})
    if names and topology.rank == 0:
        log.warning(
            "no gradient reached %s in the first iteration: is it used in forward? Weight decay alone "
            "changes it",
            few(names),
        )
    losses = [each for _, each, _ in everywhere]
    if max(losses) - min(losses) > 1e-6 * abs(max(losses)):  # never true for NaN
        raise UserError(
            f"the loss differs between the ranks of --tp {topology.tp.size}, from {min(losses):.6f} to "
            f"{max(losses):.6f}: if it sums over a cut dim, such as the columns of the logits, pass the sum "
            "to reduce_from_tensor_parallel"
        )
    values: dict[tuple[str, Box], list[tuple[float, float]]] = {}
    for *_, found in everywhere:
        for name, (box, *value) in found.items():
            values.setdefault((name, box), []).append((value[0], value[1]))
    if differing := sorted({name for (name, _), each in values.items() if not _are_close(each)}):
        raise UserError(
            f"the values of the buffer {few(differing)} differ between ranks that should have the same: sum "
            "them over topology.loss_ranks, cut the buffer with new_buffer, or register it with "
            "persistent=False if checkpoints need not have it"
        )


def _fingerprint(buffer: ParameterShard, topology: Topology) -> tuple[Box, float, float]:
    """Return which elements a rank holds, and two sums of them whose terms have different factors."""
    values = buffer.tensor.double()
    weighted = values * torch.arange(1, values.numel() + 1, dtype=values.dtype, device=values.device)
    return buffer.spec.box(topology), weighted.sum().item(), weighted.abs().sum().item()


def _are_close(values: Sequence[tuple[float, float]]) -> bool:
    sums, sizes = zip(*values, strict=True)
    return not max(sums) - min(sums) > 1e-6 * max(sizes)  # never true for NaN


class OutputCheck:
    """Check of the output of a stage of your own model, as a forward hook of the stage."""

    def __init__(self, hidden_shape: tuple[int, int, int], stage: Stage) -> None:
        self._loss_names = stage.loss_names
        self._hidden_shape = hidden_shape
        self._dtype = stage.context.dtype
        self._is_last = stage.is_last
        # Other ranks may have a stage without the mistake. Rank 0, which reports for all, has the first one.
        self._on_one_rank = not stage.is_first

    def __call__(self, stage: nn.Module, inputs: Any, output: Any) -> None:
        if (fault := self._fault(output, inputs[0].tokens.shape[0])) is not None:
            error = UserError(f"{type(stage).__name__} returns {fault}")
            error.on_one_rank = self._on_one_rank
            raise error

    def _fault(self, output: Any, num_sequences: int) -> str | None:
        """Return what is wrong with an output of a number of sequences and how to fix it, or None."""
        if isinstance(output, WithTerms):
            faults = [self._term_fault(name, term) for name, term in output.terms.items()]
            if not self._is_last:
                faults.append(self._fault(output.hidden, num_sequences))
            return next((fault for fault in faults if fault is not None), None)
        if not isinstance(output, Tensor):
            wanted = "the sum of the losses, a scalar" if self._is_last else "hidden states, a tensor"
            return f"{kind_of(output)} from forward: return {wanted}"
        shape = list(output.shape)
        if not self._is_last:
            s, b, h = self._hidden_shape
            received = [s * b // num_sequences, num_sequences, h]
            if shape == received and output.dtype == self._dtype:
                return None
            return (
                f"hidden states of shape {shape} in {output.dtype}: the next stage receives [s, b, h] = "
                f"{received} in {self._dtype}"
            )
        return _loss_fault(output)

    def _term_fault(self, name: str, term: Any) -> str | None:
        if name not in self._loss_names:
            names = ", ".join(map(repr, (*self._loss_names, name)))
            return f"the term {name} of the loss: name it in the class, loss_names = ({names})"
        if not isinstance(term, LossTerm) or not isinstance(term.total, Tensor):
            return f"{kind_of(term)} as the term {name} of the loss: return a LossTerm of a tensor"
        return _loss_fault(term.total)


def _loss_fault(loss: Tensor) -> str | None:
    if loss.shape != ():
        return (
            f"a loss of shape {list(loss.shape)}: return the sum of the losses of the microbatch's tokens, a "
            "scalar, such as self.masked_sum(losses, microbatch)"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        return "a loss without a gradient: compute it from the output without detach() and .item()"
    return None


(_POSITIONS,) = MODEL.with_role("positions")
FILE_ENDING = ".verified.json"
"""The record of ``my_model.py`` is ``my_model.verified.json``; it is valid until the program changes."""


def warn_if_unverified(run: RunContext) -> None:
    """Warn if the run cuts the weights or samples of its own model, and was not verified in such a layout.

    There a layer that lacks a collective has a wrong output or gradient, and no error shows it.
    """
    model, parallel = run.providers.model, run.config.parallel
    assert model is not None
    if run.topology.rank > 0:
        return
    verified = _verified(model)
    names = {kind: name for kind, name in _layouts(parallel).items() if kind not in verified}
    if not names:
        return
    sizes = {"tp": parallel.tp, _POSITIONS: parallel.mesh.num_position_slices}
    reason = "a missing collective gives wrong gradients"
    if _POSITIONS in names:
        reason = "a layer that mixes tokens of one rank alone computes another model"
    log.warning(
        "%s trains with %s and was not verified in this layout: %s, without an error. Run once: python %s … "
        "--params-dtype fp64 --verify-layouts %s",
        provider_name(model),
        " ".join(f"--{axis} {size}" for axis, size in sizes.items() if size > 1),
        reason,
        sys.argv[0],
        ",".join(names.values()),
    )


def record_verified(provider: StageProvider | None, layouts: Iterable[ParallelConfig]) -> None:
    """Record that a model of your own trains the same run in these layouts as on one rank."""
    kinds = {kind for layout in layouts for kind in _layouts(layout)}
    if (
        provider is None
        or not is_own_model(provider)
        or not kinds
        or (source := _source_of(provider)) is None
    ):
        return
    record = {"sha256": _digest(source), "verified": sorted(kinds | _verified(provider))}
    path = source.with_suffix(FILE_ENDING)
    try:
        path.write_text(json.dumps(record) + "\n")
    except OSError as error:
        log.warning("%s cannot be written (%s): runs in these layouts will warn", path, first_line(error))


def _layouts(parallel: ParallelConfig) -> dict[str, str]:
    """Return the layouts to verify for a layout, by the properties of it that a model's code depends on."""
    names = {}
    if parallel.tp > 1:
        sequence = "+sp" if parallel.sequence_parallel else ""
        names[f"tp{sequence}"] = f"tp{parallel.tp}{sequence}"
    if (num_slices := parallel.mesh.num_position_slices) > 1:
        names[_POSITIONS] = f"{_POSITIONS}{num_slices}"
    return names


def _verified(provider: StageProvider) -> set[str]:
    """Return the kinds of layout in which the current version of the provider's file was verified."""
    if (source := _source_of(provider)) is None:
        return set()
    try:
        record = json.loads(source.with_suffix(FILE_ENDING).read_text())
        return set(record["verified"]) if record["sha256"] == _digest(source) else set()
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _source_of(provider: StageProvider) -> Path | None:
    """Return the file that defines a provider; None in an interactive session."""
    defined = provider if inspect.isclass(provider) or inspect.isfunction(provider) else type(provider)
    try:
        file = inspect.getsourcefile(defined)
    except TypeError:
        return None
    return Path(file) if file is not None and Path(file).is_file() else None


def _digest(source: Path) -> str:
    return hashlib.sha256(source.read_bytes()).hexdigest()
