"""Run a unit of a model on meta tensors, forward and backward, and record what it does."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megalite.attention.choice import build_core
from megalite.attention.core import StageCore
from megalite.attention.positions import PositionInfo
from megalite.config import ModelConfig, RecomputeConfig
from megalite.data.microbatch import LayerState, LossTerm, Microbatch, SharedKeys
from megalite.distributed.axes import EXPERTS, MODEL, MeshSpec
from megalite.distributed.topology import Topology
from megalite.kernels.flash_attention import MAX_HEAD_DIM
from megalite.kernels.softmax import document_starts
from megalite.model.bert_stage import STAGES
from megalite.model.layer import TransformerLayer
from megalite.model.recompute import apply_recompute
from megalite.model.recurrent_mixer import RecurrentMixer
from megalite.model.stage import DTYPES, Stage, StageProvider
from megalite.observe.meta_tensors import LiveBytes, meta_tensors, watch_parts
from megalite.observe.operator_log import OperatorLog
from megalite.observe.recorder import Reader
from megalite.observe.unit_record import EMBEDDING, HEAD, INPUT, SavedPart, UnitKey, UnitRecord, WeightRecord
from megalite.tensor_parallel.fp8 import Fp8Settings
from megalite.tensor_parallel.gemm import MainGrad, WeightGradientStore, run_stored
from megalite.tensor_parallel.matrices import matrices_of
from megalite.tensor_parallel.parameter_spec import LayerContext, spec_of
from megalite.utils.errors import UserError, first_line
from megalite.utils.torch_private import read_scalar


def record_unit(key: UnitKey) -> UnitRecord:
    """Return what the unit of a key does.

    Raises:
        UserError: the program's own model reads values, or has another error.
    """
    topology = Topology.on_paper(*_axes(key))
    store = WeightGradientStore() if key.splits_backward else None
    with meta_tensors(), _planned(key), LiveBytes() as live:
        stage = _build(key, topology, store, live)
        _add_gradients_in_place(stage)
        microbatch = microbatch_of(key)
        if any(True for _ in stage.all_layers()):
            stage.prepare_tables(stage.config.seq_length)
        hidden_shape = (key.positions // (key.tp if key.sequence_parallel else 1), key.micro_batch_size)
        run = _Run(live, topology, stage, store, (*hidden_shape, key.model.hidden_size))
        return run.record(*_function_of(key, stage, microbatch, hidden_shape))


def layer_kinds(key: UnitKey) -> tuple[int, ...]:
    """Return, for each layer of the model, the number of the first layer of its kind.

    Layers are of one kind if they have the same class, the same shapes of parameters, and an equal `kind`,
    which a layer sets if it differs from others in something else, such as the tokens that it sees.
    """
    topology = Topology.on_paper({})
    with meta_tensors(), _planned(key):
        stage = _provider(key)(
            key.model,
            _context(key, topology, None),
            range(key.model.num_layers),
            is_first=False,
            is_last=False,
        )
    first: dict[Any, int] = {}
    return tuple(first.setdefault(_signature(layer), int(number)) for number, layer in stage.layers.items())


def _axes(key: UnitKey) -> tuple[dict[str, int], tuple[MeshSpec, ...]]:
    sizes = {"tp": key.tp, "cp": key.num_exchanging}
    if key.etp is None:
        return sizes, (MODEL,)
    return {**sizes, "ep": key.ep, "etp": key.etp}, (MODEL, EXPERTS)


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    spec = layer.spec if isinstance(layer, TransformerLayer) else None
    return type(layer), spec, getattr(layer, "kind", None), shapes


def _provider(key: UnitKey) -> StageProvider:
    return key.provider or STAGES[key.model.architecture]


def _context(key: UnitKey, topology: Topology, store: WeightGradientStore | None) -> LayerContext:
    return LayerContext(
        topology,
        DTYPES[key.model.params_dtype],
        sequence_parallel=key.sequence_parallel,
        has_documents=key.has_documents,
        weight_gradient_store=store,
        fuses_weight_gradients=True,
        fp8=_fp8_settings(key),
        moe_imbalance=key.moe_imbalance,
        cp_comm_type="a2a",  # recurrences have it always, and attention is recorded on one rank
        moe_token_dispatcher_type=key.moe_token_dispatcher_type,
    )


def _fp8_settings(key: UnitKey) -> Fp8Settings | None:
    options = key.fp8
    if options is None or options.fp8_format is None:
        return None
    return Fp8Settings(options.fp8_format, options.fp8_recipe, rounds_weight_gradients=options.fp8_wgrad)


def _core(config: ModelConfig, context: LayerContext) -> StageCore:
    """Return the attention core to record.

    With heads above the largest of all kernels, one call of ours stands for the GEMMs of `PlainKernel`, which
    saves the same.
    """
    is_large = config.max_head_dim > MAX_HEAD_DIM
    backend = "triton" if is_large else None
    if context.cp.size == 1:
        return build_core(config, context, backend)
    alone = replace(context, topology=Topology.on_paper({"tp": context.tp.size}))
    return _OwnPositions(config, alone, build_core(config, alone, backend).cores)


class _OwnPositions(StageCore):
    """Attention to a rank's own positions, beside a recurrence of those of all ranks."""

    def position_info(self, microbatch: Microbatch) -> PositionInfo:
        """Return the rank's positions, with the starts of the documents of whole samples."""
        ids = microbatch.document_ids
        if ids is None:
            return super().position_info(microbatch)
        own = replace(microbatch, document_ids=ids[:, : microbatch.tokens.shape[1]])
        return super().position_info(own)._replace(document_starts=document_starts(ids))


def _build(key: UnitKey, topology: Topology, store: WeightGradientStore | None, live: LiveBytes) -> Stage:
    layers = [key.unit] if isinstance(key.unit, int) else []
    provider = partial(_provider(key), attention=_core) if key.provider is None else key.provider
    stage = provider(
        key.model,
        _context(key, topology, store),
        layers,
        is_first=key.unit == EMBEDDING,
        is_last=key.unit == HEAD,
    )
    if key.triton_recurrence:
        for module in stage.modules():
            if isinstance(module, RecurrentMixer):
                module.kernel_problem = ""
    watch_parts(stage, live)
    selective: Literal["selective"] | None = "selective" if key.recomputed_modules else None
    apply_recompute(
        stage,
        RecomputeConfig(
            recompute_granularity="full" if key.recomputes_head else selective,
            recompute_modules=key.recomputed_modules,
            cross_entropy_chunks=key.cross_entropy_chunks,
            mlp_chunks=key.mlp_chunks,
        ),
    )
    return stage


def _add_gradients_in_place(stage: Stage) -> None:
    """Give weights a buffer of gradients outside of the record, as the optimizer does."""
    wide = torch.promote_types(stage.context.dtype, torch.float32)
    for parameter in stage.parameters():
        total = torch.empty(parameter.shape, dtype=wide, device="meta")
        gradient = MainGrad(lambda total=total: (total, False), lambda: None, None)  # type: ignore[misc]
        parameter.main_grad = gradient  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(_forget_gradient)


def _forget_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def microbatch_of(key: UnitKey) -> Microbatch:
    """Return the input of one forward pass, without values."""

    def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    b, s = key.micro_batch_size, key.positions
    if key.model.architecture != "bert":
        ids = numbers(b, s * key.num_exchanging) if key.has_documents else None
        plain = Microbatch(numbers(b, s), numbers(b, s), numbers(b))
        # Documents are those of whole samples, and later tokens are this rank's.
        return replace(plain.with_later_tokens(key.model.mtp_num_layers), document_ids=ids)
    k = max(1, round(s * key.model.predicted_share))
    return Microbatch(
        numbers(b, s),
        numbers(b, k),
        numbers(b),
        document_ids=numbers(b, s),
        loss_mask=numbers(b, k, dtype=torch.bool),
        label_positions=numbers(b, k),
        token_types=numbers(b, s),
        order_labels=numbers(b),
    )


def _function_of(
    key: UnitKey, stage: Stage, microbatch: Microbatch, hidden_shape: tuple[int, int]
) -> tuple[Callable[[Tensor], list[Tensor]], Iterable[nn.Parameter]]:
    """Return the unit as a function of hidden states, and its parameters.

    The function returns the tensors from which backward starts, the unit's output first.

    Args:
        hidden_shape: ``[s, b]`` of the hidden states.
    """
    if key.unit == EMBEDDING:

        def embed(_: Tensor) -> list[Tensor]:
            state = LayerState.of(stage.embedding(microbatch))
            return [state.hidden, *state.embeddings.values()]

        return embed, stage.embedding.parameters()
    if key.unit == HEAD:

        def losses(x: Tensor) -> list[Tensor]:
            found = stage.losses(stage.last_module(x), microbatch)
            return _totals(found) if isinstance(found, Mapping) else [found]

        return losses, stage.last_parameters()
    (layer,) = stage.layers.values()
    assert isinstance(key.unit, int)
    inputs, size = stage.layer_inputs(microbatch), key.model.hidden_size_per_layer_input
    # The record of the embedding counts the layers' own embeddings.
    embeddings = {} if size is None else {key.unit: _on_paper(stage, (*hidden_shape, size))}
    keys: SharedKeys = {}
    if isinstance(layer, TransformerLayer) and (spec := layer.spec.attention) is not None:
        shape = key.positions, key.micro_batch_size, max(1, spec.num_kv_heads // key.tp), spec.head_dim
        keys = {number: (_on_paper(stage, shape), _on_paper(stage, shape)) for number in spec.reads}

    def run(x: Tensor) -> list[Tensor]:
        # Keys that the layer computes for later ones are dropped: what outlives forward is saved anyway.
        state = stage.run_group(range(1), [layer], LayerState(x, embeddings, keys), *inputs)
        return [state.hidden, *_totals(state.terms)]

    return run, layer.parameters()


def _totals(terms: Mapping[str, Tensor | LossTerm]) -> list[Tensor]:
    """Return the terms of the loss from which backward starts."""
    totals = (term if isinstance(term, Tensor) else term.total for term in terms.values())
    return [each for each in totals if each.requires_grad]


def _on_paper(stage: Stage, shape: Sequence[int]) -> Tensor:
    """Return a tensor on device meta that another unit computes."""
    return torch.empty(*shape, dtype=stage.context.dtype, device="meta", requires_grad=True)


class _Run:
    """Counted run of a unit.

    Args:
        live: counts bytes since before the unit was built.
        shape: shape of the hidden states.
    """

    def __init__(
        self,
        live: LiveBytes,
        topology: Topology,
        stage: Stage,
        store: WeightGradientStore | None,
        shape: Sequence[int],
    ) -> None:
        self._live, self._topology, self._stage = live, topology, stage
        self._store, self._shape = store, shape
        layers = (layer for layer in stage.all_layers() if isinstance(layer, TransformerLayer))
        attention = (layer.spec.attention for layer in layers)
        self._window = next((spec.window for spec in attention if spec is not None), None)

    def record(
        self, function: Callable[[Tensor], list[Tensor]], parameters: Iterable[nn.Parameter]
    ) -> UnitRecord:
        weights, live = tuple(self._weights(parameters)), self._live
        lasting, before, dtype = live.now, live.by_part.copy(), self._stage.context.dtype
        live.start_peak()
        fp8 = self._stage.context.fp8
        # The largest magnitudes of weights are known in backward.
        iteration = nullcontext() if fp8 is None else fp8.weights.iteration(keeps_copies=False)
        all_weights = list(self._stage.parameters())
        with iteration, OperatorLog(self._topology, self._window, all_weights) as log:
            with live.part(INPUT):
                x = torch.empty(*self._shape, dtype=dtype, device="meta", requires_grad=True)
            outputs = function(x)
            input_bytes = x.nbytes
            del x
            forward = log.take()
            parts = live.by_part.copy()
            parts.subtract(before)
            if outputs[0].dim():  # the next unit, or the stage after it, counts the output
                parts[live.part_of(outputs[0])] -= outputs[0].nbytes
            saved = sum(parts.values())
            workspace = live.peak - lasting - saved
            live.start_peak()
            grads = [torch.empty_like(each) for each in outputs]
            log.take()
            if self._store is None:
                torch.autograd.backward(outputs, grads)
                backward, weight = log.take(), log.take()
            else:
                with self._store.collect() as stored:
                    torch.autograd.backward(outputs, grads)
                backward = log.take()
                run_stored(stored)
                weight = log.take()
            workspace = max(workspace, live.peak - lasting - saved)
        by_part = tuple(SavedPart(*each) for each in parts.items() if each[1])
        return UnitRecord(weights, forward, backward, weight, input_bytes, by_part, workspace)

    def _weights(self, parameters: Iterable[nn.Parameter]) -> Iterator[WeightRecord]:
        names = {parameter: name for name, parameter in self._stage.named_parameters()}
        tied = self._stage.tied_weight
        for parameter in dict.fromkeys(parameters):
            spec = spec_of(parameter)
            yield WeightRecord(
                names[parameter],
                spec.full_shape,
                parameter.numel(),
                spec.dim_cut_over("tp") is not None,
                parameter is tied,
                tuple(matrix.shape for matrix in matrices_of(spec)) if spec.is_matrix else (),
                spec.parameter_axes.axes(self._topology).mesh_spec.name,
            )


@contextmanager
def _planned(key: UnitKey) -> Iterator[None]:
    """Report in one line that the program's own model cannot run on meta tensors, and where."""
    if key.provider is None:
        yield
        return
    try:
        with _NoReads():
            yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"the model cannot be planned: {_line_of(traceback.extract_tb(error.__traceback__))} raises "
            f"{type(error).__name__}: {first_line(error)}; a plan runs the model on tensors without values"
        ) from error


class _NoReads(Reader):
    """Refusal of reads of values from the device, since meta tensors have none."""

    def reads(self, func: Any) -> bool:
        return func is read_scalar

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        raise UserError(
            f"the model cannot be planned: {_line_of(traceback.extract_stack())} reads a value from the "
            "device; a plan runs the model on tensors without values, and on a GPU the read would wait "
            "for all kernels"
        )


_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def _line_of(frames: Iterable[traceback.FrameSummary]) -> str:
    """Return the innermost line of a stack that is neither torch's nor megalite's, with its function."""
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    if not own:
        return "it"
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}, in {own[-1].name},"
