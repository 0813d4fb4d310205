"""The units of a planned run (embedding, layers, head): their records on one tensor-parallel rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

from megalite.config import ModelConfig
from megalite.config.model.model_config import padded_vocab_size
from megalite.config.parallel import KeyExchange
from megalite.config.training import Fp8Options
from megalite.observe.records import kinds_of_layers, unit_record
from megalite.observe.unit_record import EMBEDDING, HEAD, AttentionCall, UnitKey, UnitRecord, WeightRecord

T = TypeVar("T")
Sizes = Counter[str]
"""Elements on a rank, by the mesh of the ranks whose axes cut and replicate them."""


class UnitsKey(NamedTuple):
    """Everything that the records of a run depend on.

    Attributes:
        any_unit: key of the units' records; its `unit` has no meaning, and its settings of recomputation are
            those of the run.
        exchanges: how queries reach the keys of other ranks' positions, in all layers or in each; empty if
            a rank holds all positions.
    """

    any_unit: UnitKey
    exchanges: tuple[KeyExchange, ...] = ()

    def exchange_of(self, layer: int) -> KeyExchange | None:
        """Return how a layer's queries reach other ranks' keys; modules after the last one are like it."""
        return self.exchanges[min(layer, len(self.exchanges) - 1)] if self.exchanges else None


@dataclass(frozen=True, eq=False)
class ModelUnits:
    """Records of a model's units on one tensor-parallel rank.

    Attributes:
        kinds: for each layer of the model, the number of the first layer of its kind.
        layers: record of each kind of layer, by that number.
    """

    embedding: UnitRecord
    head: UnitRecord
    kinds: tuple[int, ...]
    layers: Mapping[int, UnitRecord]
    _shared: dict[Hashable, Any] = field(default_factory=dict)

    def shared(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make` for the first run with these records and this key.

        Many layouts of a search differ only in few options, such as the ZeRO stage. They share what does not
        depend on these.

        Args:
            key: name of the result, and everything that it depends on besides the records.
        """
        if key not in self._shared:
            self._shared[key] = make()
        found: T = self._shared[key]
        return found

    @cached_property
    def layer_sizes(self) -> dict[int, Sizes]:
        """Return the parameters of a layer of each kind on the rank."""
        return {kind: sizes_of(layer.weights) for kind, layer in self.layers.items()}

    @cached_property
    def largest_layer(self) -> int:
        """Return the parameters of the largest layer on the rank."""
        return max(sizes.total() for sizes in self.layer_sizes.values())

    @cached_property
    def head_size(self) -> int:
        """Return the parameters after the last layer on the rank, with a weight that it shares."""
        return sum(weight.size for weight in self.head.weights)

    @cached_property
    def tied_size(self) -> int:
        """Return the parameters on the rank that the embedding and the head share."""
        return sum(weight.size for weight in self.head.weights if weight.is_tied)

    @cached_property
    def edge_sizes(self) -> dict[tuple[bool, bool], Sizes]:
        """Return the parameters outside the layers on a rank, by whether it has the first and last stage."""
        first, last = self.embedding.weights, self.head.weights
        return {
            (False, False): Sizes(),
            (True, False): sizes_of(first),
            (False, True): sizes_of(last),
            (True, True): sizes_of([*first, *(weight for weight in last if not weight.is_tied)]),
        }

    @property
    def forward_flops(self) -> float:
        """Return the FLOPs of a microbatch's forward on the rank: GEMMs and attention."""
        phases = [self.embedding.forward, self.head.forward]
        phases += [self.layers[kind].forward for kind in self.kinds]
        return sum(
            sum(gemm.flops for gemm in phase.gemms) + sum(call.flops for call in phase.attention)
            for phase in phases
        )

    @property
    def num_parameters(self) -> int:
        """Return the parameters of the whole model on all ranks."""
        layers = sum(self.layers[kind].num_parameters for kind in self.kinds)
        tied = replace(self.head, weights=tuple(each for each in self.head.weights if each.is_tied))
        return self.embedding.num_parameters + layers + self.head.num_parameters - tied.num_parameters


def sizes_of(weights: Iterable[WeightRecord]) -> Sizes:
    """Return the elements of weights on the rank."""
    sizes = Sizes()
    for weight in weights:
        sizes[weight.mesh] += weight.size
    return sizes


@dataclass(frozen=True, eq=False)
class RankUnits:
    """Units of a pipeline rank's stages.

    Attributes:
        kinds: kinds of its layers, of all its stages.
        is_first, is_last: whether it has the first or the last stage.
        edges: parameters outside the layers, on one of the ranks that cut them. Both ends hold a tied
            embedding.
        sizes: all parameters, on one of the ranks that cut them.
    """

    kinds: tuple[int, ...]
    is_first: bool
    is_last: bool
    edges: Sizes
    sizes: Sizes

    @cached_property
    def size(self) -> int:
        """Return the number of all parameters."""
        return self.sizes.total()


def whole_model(model: ModelConfig, tp: int, provider: Callable[..., Any] | None = None) -> ModelUnits:
    """Return the records of a whole model on one rank, for one sample; its vocabulary is padded as for `tp`.

    Args:
        provider: builds the stages of the program's own model.
    """
    key = UnitKey(
        replace(model, attention_backend="auto", pad_vocab_size_to=padded_vocab_size(model, tp)),
        0,
        tp=1,
        positions=model.seq_length,
        micro_batch_size=1,
        sequence_parallel=False,
        has_documents=not model.is_causal,
        splits_backward=False,
        provider=provider,
    )
    return units_of(UnitsKey(key))


_NO_EXPERT_AXES: dict[str, Any] = {
    "ep": 1,
    "etp": None,
    "moe_imbalance": 1.0,
    "moe_token_dispatcher_type": "alltoall",
}


@lru_cache(maxsize=4096)
def units_of(key: UnitsKey) -> ModelUnits:
    """Return the records of a run."""
    whole = key.any_unit
    edge = replace(
        whole, recomputed_modules=(), recomputes_head=False, mlp_chunks=1, fp8=None, **_NO_EXPERT_AXES
    )
    head = replace(edge, unit=HEAD)
    if whole.model.mtp_num_layers:
        head = replace(whole, unit=HEAD, num_exchanging=_num_exchanging(key, whole.model.num_layers))
    one = replace(edge, unit=0, tp=1, micro_batch_size=1, sequence_parallel=False, splits_backward=False)
    any_padding = replace(one.model, pad_vocab_size_to=None)  # any number of ranks accepts it
    recorded = kinds_of_layers(replace(one, model=any_padding, cross_entropy_chunks=1))
    kinds = _kinds_by_options(recorded, key)
    layer = replace(whole, cross_entropy_chunks=1, recomputes_head=False)
    return ModelUnits(
        unit_record(replace(edge, unit=EMBEDDING, splits_backward=False, cross_entropy_chunks=1)),
        _with_all_keys(unit_record(head), key, whole.model.num_layers),
        kinds,
        {
            kind: _with_all_keys(
                unit_record(
                    replace(
                        layer,
                        unit=recorded[kind],
                        num_exchanging=_num_exchanging(key, kind),
                        fp8=_fp8_of(whole, kind),
                    )
                ),
                key,
                kind,
            )
            for kind in set(kinds)
        },
    )


def _kinds_by_options(kinds: Sequence[int], key: UnitsKey) -> tuple[int, ...]:
    """Return the kinds of layers, which also differ by their exchange of keys and by 8-bit GEMMs."""
    whole = key.any_unit
    if not key.exchanges and whole.fp8 is None:
        return tuple(kinds)
    first: dict[tuple[int, KeyExchange | None, Fp8Options | None], int] = {}
    found = []
    for number, kind in enumerate(kinds):
        exchange = None if whole.model.layer_spec(number).attention is None else key.exchange_of(number)
        found.append(first.setdefault((kind, exchange, _fp8_of(whole, number)), number))
    return tuple(found)


def _fp8_of(key: UnitKey, layer: int) -> Fp8Options | None:
    """Return `UnitKey.fp8` of a layer by its number: options that do not depend on the number."""
    if key.fp8 is None or not key.fp8.is_layer_in_fp8(layer, key.model.num_layers):
        return None
    return replace(key.fp8, first_last_layers_bf16=False)


def _num_exchanging(key: UnitsKey, layer: int) -> int:
    """Return `UnitKey.num_exchanging` of a layer."""
    exchange = key.exchange_of(layer)
    is_recurrent = key.any_unit.model.layer_spec(layer).recurrence is not None
    return exchange.num_ranks if exchange is not None and is_recurrent else 1


def _with_all_keys(layer: UnitRecord, key: UnitsKey, number: int) -> UnitRecord:
    """Return the record of layer `number` whose queries attend to the keys of all ranks' positions."""
    exchange = key.exchange_of(number)
    if exchange is None or not layer.forward.attention:
        return layer
    num_ranks, neighbours, ring, _ = exchange

    def exchanged(call: AttentionCall) -> AttentionCall:
        """Return a call with the tokens of all ranks that exchange heads, and a part of the heads."""
        if neighbours == 1:
            return call
        return call._replace(
            heads=call.heads // neighbours,
            kv_heads=max(key.any_unit.micro_batch_size, call.kv_heads // neighbours),
            queries=call.queries * neighbours,
        )

    def extended(call: AttentionCall) -> AttentionCall:
        return exchanged(call)._replace(keys=call.keys * num_ranks, exchange=exchange)

    forward, backward = (
        replace(phase, attention=tuple(map(extended, phase.attention)))
        for phase in (layer.forward, layer.backward)
    )
    extended_layer = replace(layer, forward=forward, backward=backward)
    if "core_attn" in key.any_unit.recomputed_modules:
        return extended_layer
    # Backward needs the keys and values that attention read, instead of the rank's own. A ring keeps those of
    # this rank, and receives the others again.
    element = layer.forward.gemms[0].element_bytes
    more = sum(
        (after.kv_heads * after.keys // ring - before.kv_heads * before.keys)
        * (before.size + before.value_size)
        * element
        for before, after in zip(layer.forward.attention, forward.attention, strict=True)
    )
    return extended_layer.saving({"core_attn": more})
