"""Run one iteration in one layout, and record each rank's tensors in the order of execution.

Recorded are the microbatches, the inputs and outputs of all modules and wrap points with their gradients, the
terms of the loss, the gradients of parameters before and after each reduction, and the weights. If backward
runs a module again, its inputs and outputs are recorded a second time. Each value
comes with its place in the global tensor, so that values of different layouts can be compared.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from megalite.config import Config
from megalite.data.microbatch import Microbatch
from megalite.distributed.axes import Slice
from megalite.distributed.axis import HeldPositions, observing
from megalite.distributed.local_ranks import run_ranks
from megalite.distributed.topology import Topology
from megalite.model.stage import Stage
from megalite.observe.operator_log import Collective, CollectiveList
from megalite.observe.recorder import Reader, watch_modules, watch_point
from megalite.pipeline.schedules import Action, ActionKind
from megalite.tensor_parallel.parameter_spec import ParameterSpec, spec_of
from megalite.tensor_parallel.placement import Box
from megalite.train.model_chunks import named_parameters, saved_buffers
from megalite.train.run_context import Providers, build_data, resolve_run
from megalite.train.train_step import StepResult
from megalite.train.trainer import Trainer
from megalite.utils.errors import UserError
from megalite.utils.torch_private import version_of

NOT_PARTS = {"forward", "run_layers", "run_group"}
"""Wrap points whose inputs and outputs hooks of modules record."""


@dataclass
class Activation:
    """Tensor that a module or a wrap point reads or returns in the forward of one microbatch.

    Attributes:
        names: what it is, such as "output of layers.0.mlp", in the order in which forward meets it.
        microbatch: index among this rank's microbatches of the iteration.
        value, gradient: None for a gradient that backward has not computed.
        num_before: number of this rank's collectives before the value.
        gradient_name: what the gradient is called: the name from which backward reaches the tensor.
        gradient_num_before: number of this rank's collectives before the gradient.
        gradient_order: number of gradients that backward computed before.
        batch_dim: dim of the samples if it is known.
        features: full sizes of the dims that the last dim consists of, if tensor parallelism cuts an inner
            one.
    """

    names: list[str]
    microbatch: int
    value: Tensor
    num_before: int
    gradient_name: str
    gradient: Tensor | None = None
    gradient_num_before: int = 0
    gradient_order: int = 0
    batch_dim: int | None = None
    features: tuple[int, ...] = ()


class StepTensor(NamedTuple):
    """Tensor of an iteration outside of modules: of a parameter, or a number.

    Attributes:
        phase: when it is recorded, a key of `first_difference.PHASES`.
        box: its place in the full tensor.
        num_used: number of rows of the full tensor before padding.
        summed_over: names of axes whose ranks' values add up to the full one.
        num_before: number of this rank's collectives before it.
    """

    phase: str
    name: str
    value: Tensor
    box: Box
    num_used: int
    summed_over: tuple[str, ...]
    num_before: int


@dataclass(frozen=True)
class RankTrace:
    """Tensors and collectives of one rank in one iteration.

    Attributes:
        coordinates, sizes: the rank's coordinate along each axis, and the number of ranks along it.
        meshes: the rank's coordinates along the axes of each mesh of the ranks.
        positions: the slice of the sequence whose hidden states the rank holds, in the order of the ranks.
        replicas: names of the axes over which gradients are reduced.
        loss_collectives: which collectives of the rank sum the loss.
        first_sample: number of the first sample of the global batch in the run.
        first_samples: index in the global batch of the first sample of each microbatch.
        recomputed: tensors of modules that backward has run again, without gradients.
        head: name of the module between the last layer and the losses.
        held: positions of each sample's tokens that the rank holds.
    """

    rank: int
    coordinates: Mapping[str, int]
    sizes: Mapping[str, int]
    meshes: Sequence[Mapping[str, int]]
    positions: Slice
    replicas: tuple[str, ...]
    loss_collectives: range
    micro_batch_size: int
    first_sample: int
    first_samples: Sequence[int]
    microbatches: list[Activation]
    activations: list[Activation]
    steps: list[StepTensor]
    collectives: list[Collective]
    recomputed: list[Activation] = field(default_factory=list)
    head: str = "head"
    held: HeldPositions = field(default_factory=lambda: HeldPositions(0, 1))

    def coordinates_outside(self, axes: Collection[str]) -> dict[str, int]:
        """Return the rank's coordinates along the other axes of the mesh that has these axes."""
        found = next(each for each in self.meshes if each.keys() >= set(axes))
        return {axis: rank for axis, rank in found.items() if axis not in axes}


@dataclass
class ActivationRecorder(Reader):
    """Tensors that the modules of a rank read and return, once `watch` has added hooks to a stage.

    It observes the pipeline's actions: what runs in a backward is recomputed.
    """

    collectives: CollectiveList
    microbatches: list[Activation] = field(default_factory=list)
    activations: list[Activation] = field(default_factory=list)
    recomputed: list[Activation] = field(default_factory=list)
    _microbatch: int | None = None
    _seen: dict[tuple[int, int], tuple[Tensor, Activation]] = field(default_factory=dict)
    _calls: Counter[str] = field(default_factory=Counter)
    _num_gradients: int = 0

    def begins(self, what: object) -> None:
        """Begin to record the modules that an action runs."""
        if isinstance(what, Action):
            self._microbatch = what.microbatch
            self.collectives.in_forward = what.kind is ActionKind.FORWARD

    def ends(self, what: object) -> None:
        """Stop recording at an action's end."""
        if not isinstance(what, Action):
            return
        self._microbatch = None
        self.collectives.in_forward = False
        self._seen.clear()
        self._calls.clear()

    def watch(self, stage: Stage) -> None:
        """Record the tensors of a stage: of modules by hooks, of other methods at their wrap points."""
        modules = dict(stage.named_modules())
        watch_modules(self, (each for each in modules.items() if not isinstance(each[1], nn.Identity)))
        for name, module in modules.items():
            for method in sorted(_wrap_points(module) - NOT_PARTS):
                watch_point(self, f"{name}.{method}".lstrip("."), module, method)

    def enters(
        self, name: str, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if isinstance(module, Stage):
            self._note_microbatch(module, args[0])
        else:
            self._note(f"input of {name}", (*args, *kwargs.values()))

    def leaves(self, name: str, module: nn.Module | None, args: tuple[Any, ...], output: Any) -> None:
        if output is not None and not isinstance(module, Stage):
            spec = getattr(getattr(module, "weight", None), "spec", ParameterSpec(()))
            features = spec.full_shape[:-1] if len(spec.full_shape) > 2 else ()
            self._note(f"output of {name}", output, features)

    def _note_microbatch(self, stage: Stage, microbatch: Any) -> None:
        if self._microbatch is None or not isinstance(microbatch, Microbatch):
            return
        # Slices of the tokens have selected positions in an order of their own.
        is_reordered = microbatch.label_positions is not None and stage.context.topology.positions.count > 1
        selected = ("labels", "loss_mask", "label_positions") if is_reordered else ()
        for each in fields(microbatch):  # a stage between the first and the last may get no tokens or labels
            value = getattr(microbatch, each.name)
            if not isinstance(value, Tensor):
                continue
            is_real = stage.is_first or stage.is_last or each.name not in ("tokens", "labels")
            is_real &= each.name not in selected
            if is_real:
                name = f"{each.name} of the microbatch"
                value = value.detach().double().cpu()
                entry = Activation(
                    [name], self._microbatch, value, len(self.collectives.found), name, batch_dim=0
                )
                self.microbatches.append(entry)

    def _note(self, name: str, value: Any, features: tuple[int, ...] = ()) -> None:
        if self._microbatch is None:
            return
        self._calls[name] += 1
        call = f" in call {self._calls[name]}" if self._calls[name] > 1 else ""
        tensors = list(_tensors(value, is_output=name.startswith("output")))
        for number, tensor in enumerate(tensors):
            which = f" {number + 1}" if number else ""
            self._note_tensor(name.replace("put of", f"put{which} of", 1) + call, tensor, features)

    def _note_tensor(self, name: str, tensor: Tensor, features: tuple[int, ...]) -> None:
        assert self._microbatch is not None
        is_forward = self.collectives.in_forward
        recorded = self.activations if is_forward else self.recomputed
        key = id(tensor), version_of(tensor)
        if key in self._seen:
            _, entry = self._seen[key]
            entry.names.append(name)
            if entry is recorded[-1]:  # no other tensor was met in between
                entry.gradient_name = name
            return
        value = tensor.detach().clone().cpu()
        entry = Activation(
            [name], self._microbatch, value, len(self.collectives.found), name, features=features
        )
        recorded.append(entry)
        self._seen[key] = tensor, entry  # the tensor stays alive, so that its id is not used again
        if is_forward and tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(partial(self._note_gradient, entry))

    def _note_gradient(self, entry: Activation, gradient: Tensor) -> None:
        entry.gradient = gradient.detach().clone().cpu()
        entry.gradient_num_before = len(self.collectives.found)
        entry.gradient_order = self._num_gradients
        self._num_gradients += 1


def _wrap_points(module: nn.Module) -> set[str]:
    kind = type(module)
    return {name for name in dir(kind) if hasattr(getattr(kind, name, None), "communicates")}


def _tensors(value: Any, is_output: bool) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a value: of an output also mappings, and parameters not cut."""
    if isinstance(value, nn.Parameter):
        if is_output and not getattr(value, "spec", ParameterSpec(())).cuts:
            yield value
    elif isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, (tuple, list)) or (is_output and isinstance(value, Mapping)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each, is_output)


class StepRecorder:
    """Record of the loss, gradients of parameters and weights of an iteration."""

    def __init__(self, trainer: Trainer, collectives: CollectiveList) -> None:
        self.steps: list[StepTensor] = []
        self._trainer = trainer
        self._collectives = collectives
        self._specs = {name: spec_of(each) for name, each in named_parameters(trainer.chunks)}
        self._messages: dict[int, Tensor] = {}  # what a buffer sends, by the buffer's id
        self._num_before_norm = 0
        self.loss_collectives = range(0)

    def watch(self) -> None:
        """Call methods of this object during the trainer's next iteration."""
        trainer, optimizer = self._trainer, self._trainer.optimizer
        for buffer in optimizer.buffers:
            _around(buffer, "start_reduce", before=partial(self._note_message, buffer))
        _around(trainer.train_step.batches, "open", after=self._note_divisors)
        _around(trainer.pipeline, "train_step", after=self._note_losses)
        _around(optimizer, "_finish_reduction", after=self._note_reduced)
        _around(optimizer, "_sum_partial", after=self._note_all_sums)
        _around(optimizer, "finish_gradients", self._note_loss_is_summed, self._note_complete)

    def note_weights(self, phase: str) -> None:
        """Record the weights and buffers, as this rank has them."""
        trainer = self._trainer
        with self._collectives.paused():
            trainer.optimizer.finish_weights()
            for name in self._specs:
                self._note_parameter(phase, name, trainer.optimizer.weight(name))
        for name, buffer in saved_buffers(trainer.chunks, trainer.topology).items():
            self._add(phase, name, buffer.tensor.view(buffer.shape), buffer.spec)

    def note_result(self, result: StepResult) -> None:
        """Record the terms of the loss over the global batch."""
        for name, loss in result.losses.items():
            total = torch.tensor(loss, dtype=torch.float64)
            self._add("loss", name, total, num_before=self.loss_collectives.stop)

    def _note_divisors(self, result: tuple[Any, Mapping[str, float | Tensor]]) -> None:
        for unit, divisor in result[1].items():
            self._add("divisor", f"the number of {unit}s", torch.as_tensor(divisor).double())

    def _note_losses(self, losses: Sequence[Mapping[str, Tensor]]) -> None:
        self.loss_collectives = range(len(self._collectives.found), 0)
        topology = self._trainer.topology
        axes = (*topology.loss_ranks.spans, *topology.pp.spans)
        for name in self._trainer.train_step.loss_names:
            values = [terms[name].double() for terms in losses if name in terms]
            total = torch.stack(values).sum() if values else torch.zeros((), dtype=torch.float64)
            self._add("own loss", name, total, summed_over=axes)

    def _note_loss_is_summed(self) -> None:
        self.loss_collectives = range(self.loss_collectives.start, len(self._collectives.found))

    def _note_message(self, buffer: Any) -> None:
        earlier = self._messages.get(id(buffer))
        message = buffer.complete().detach().clone()
        self._messages[id(buffer)] = message if earlier is None else earlier + message

    def _note_reduced(self, _: None) -> None:
        optimizer = self._trainer.optimizer
        summed_last = {id(buffer) for buffer in optimizer._summed_last}
        for buffer in optimizer.buffers:
            copies = ("pp",) if id(buffer) in summed_last else ()
            with self._collectives.paused():
                reduced = buffer.all_gather()
            message = self._messages.get(id(buffer), reduced)
            for entry in buffer.bucket.entries:
                name, partial_over = entry.name, self._specs[entry.name].partial_over or ()
                own, summed = (buffer.bucket.view(each, entry) for each in (message, reduced))
                replicas = (*buffer.replicas.spans, *partial_over, *copies)
                self._note_parameter("own gradient", name, own, replicas)
                self._note_parameter("reduced gradient", name, summed, partial_over)

    def _note_all_sums(self, _: None) -> None:
        self._num_before_norm = len(self._collectives.found)

    def _note_complete(self, norm: Tensor) -> None:
        with self._collectives.paused():
            for name, spec in self._specs.items():
                gradient = self._trainer.optimizer.gradient(name)
                self._add("gradient", name, gradient, spec, num_before=self._num_before_norm)
        self._add("norm", "the gradient norm", norm)

    def _note_parameter(
        self, phase: str, name: str, value: Tensor, summed_over: tuple[str, ...] = ()
    ) -> None:
        self._add(phase, name, value, self._specs[name], summed_over)

    def _add(
        self,
        phase: str,
        name: str,
        value: Tensor,
        spec: ParameterSpec | None = None,
        summed_over: tuple[str, ...] = (),
        num_before: int | None = None,
    ) -> None:
        spec = spec or ParameterSpec(tuple(value.shape))
        box = spec.box(self._trainer.topology)
        used = spec.used_shape[0] if spec.used_shape else 1
        value = value.detach().clone().cpu()
        num_before = len(self._collectives.found) if num_before is None else num_before
        self.steps.append(StepTensor(phase, name, value, box, used, summed_over, num_before))


def _around(
    owner: Any,
    name: str,
    before: Callable[[], object] | None = None,
    after: Callable[[Any], object] | None = None,
) -> None:
    """Replace a method of one object by one that also calls a function before it, or with its result."""
    method = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        result = method(*args, **kwargs)
        if after is not None:
            after(result)
        return result

    setattr(owner, name, called)


def trace_rank(
    topology: Topology,
    config: Config,
    iteration: int,
    generator_seed: int = 0,
    providers: Providers | None = None,
) -> RankTrace:
    """Train up to an iteration on this rank, counted from 1, and record it.

    Args:
        generator_seed: seed of the generators of torch, numpy and Python, which a model must not use.
    """
    run = resolve_run(config, topology, providers=providers)
    with Trainer(run, build_data(run)) as trainer:
        torch.manual_seed(generator_seed)
        np.random.seed(generator_seed)
        random.seed(generator_seed)
        for _ in range(iteration - 1):
            trainer.step()
        collectives = CollectiveList(topology)
        activations = ActivationRecorder(collectives)
        for chunk in trainer.chunks:
            activations.watch(chunk)
        trainer.pipeline.overlap_slots = None  # a module that runs belongs to one action
        steps = StepRecorder(trainer, collectives)
        steps.note_weights("weight before")
        steps.watch()
        with collectives, observing(topology.observers, activations):
            result = trainer.step()
        steps.note_result(result)
        steps.note_weights("weight")
        ranks, size = topology.sample_ranks, config.training.micro_batch_size
        return RankTrace(
            topology.rank,
            topology.coordinates,
            topology.sizes,
            [{name: axis.rank for name, axis in each.axes.items()} for each in topology.meshes.values()],
            trainer.chunks[0].context.sequence_slice,
            tuple(part.name for part in topology.replicas.parts),
            steps.loss_collectives,
            size,
            result.plan.first_sample,
            [(index * ranks.size + ranks.rank) * size for index in range(result.plan.num_microbatches)],
            activations.microbatches,
            activations.activations,
            steps.steps,
            collectives.found,
            activations.recomputed,
            trainer.chunks[0].head_name,
            topology.positions,
        )


def trace_run(
    config: Config,
    world_size: int,
    iteration: int,
    generator_seed: int = 0,
    providers: Providers | None = None,
) -> list[RankTrace]:
    """Trace an iteration on all ranks of a layout, on this machine; see `trace_rank`.

    Raises:
        UserError: the layout assigns documents, so its ranks hold other positions of each sample.
    """
    if config.mesh.assigns_documents:
        raise UserError(
            "the first difference of a layout with --dynamic-context-parallel cannot be located, because its "
            "ranks hold other positions of each sample: remove it, or compare losses and gradients alone"
        )
    return run_ranks(
        trace_rank,
        config.mesh,
        world_size,
        config,
        iteration,
        generator_seed,
        providers,
        timeout=3600.0,
    )
