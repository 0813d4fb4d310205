"""A pipeline stage of a model: an embedding, layers, a head and the loss.

Shapes: s sequence, b microbatch, h hidden size, v padded vocabulary, tp = tp.size. With sequence parallelism
every ``[s, b, h]`` is a rank's slice, ``[s/tp, b, h]``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.data.microbatch import (
    LM_LOSS,
    Z_LOSS,
    LayerState,
    LossTerm,
    Microbatch,
    WithTerms,
    add_terms,
)
from megalite.kernels import site_key
from megalite.model.embedding import Embedding, OutputLayer, VocabHead
from megalite.tensor_parallel.counter_random import initialize
from megalite.tensor_parallel.parameter_spec import (
    LayerContext,
    ParameterSpec,
    buffer_spec,
    replicate_parameters,
)
from megalite.tensor_parallel.vocab_parallel import losses_and_log_sums, vocab_parallel_cross_entropy
from megalite.utils.errors import UserError, check_call, kind_of
from megalite.utils.wrapping import wrap_point

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


class Stage(nn.Module, ABC):
    """Runs some layers of a model; the first stage also runs the embedding, the last one head and losses.

    Subclass it for a model of your own, and define `build_layer`. By default the embedding is GPT's, and the
    head predicts the next token with its own weight.

    The modules may be megalite's tensor-parallel layers, or torch's own modules, which are replicated over
    tp. Use megalite's `Dropout`: torch's dropout depends on the layout. Checkpoints hold buffers, unless they
    are registered with ``persistent=False``.

    Parameters have their names in the whole model, on any stage: ``layers.7.mlp.up.weight``.

    Args:
        context: settings shared by all modules; its dtype is the config's.
        layers: numbers of the stage's layers in the whole model.
        is_first: whether the stage maps tokens to hidden states.
        is_last: whether the stage computes the loss.
        shared: arguments of `build_shared`.

    Attributes:
        layers: layers by their numbers in the whole model.
        layer_groups: indices of the layers that are recomputed together; by default each layer is a group.
        buffer_specs: specs of the stage's buffers by name, also after a module has replaced the tensor.
        embedding: maps a `Microbatch` to ``[s, b, h]``; on the first stage.
        layer_arguments: names of the arguments of a layer's forward besides x.
        head_name: name of the module of `build_head`.
        loss_names: names of all terms of the model's loss, on any stage; a subclass that adds terms sets it.
        mixes_tokens: whether a layer mixes the tokens of a rank and does not get those of other ranks; a
            subclass sets it, and context parallelism is then refused.

    Raises:
        UserError: a subclass builds an object that is not a module, or that does not take its arguments, or
            the model cannot be cut by context parallelism.
    """

    embedding: nn.Module
    layers: nn.ModuleDict
    layer_groups: Sequence[range] | None = None
    layer_arguments: tuple[str, ...] = ("microbatch",)
    head_name: str = "head"
    loss_names: tuple[str, ...] = (LM_LOSS,)
    mixes_tokens: bool = False
    buffer_specs: Mapping[str, ParameterSpec]

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        layers: Iterable[int],
        *,
        is_first: bool = True,
        is_last: bool = True,
        **shared: Any,
    ) -> None:
        super().__init__()
        assert context.dtype == DTYPES[config.params_dtype], (context.dtype, config.params_dtype)
        ranks = context.topology.position_ranks
        if self.mixes_tokens and ranks.size > 1:
            flags = " and ".join(f"--{name}" for name in ranks.spans)
            raise UserError(
                f"{type(self).__name__} mixes the tokens of a rank alone (mixes_tokens), so a sample cannot "
                f"be cut over {ranks.size} ranks: remove {flags}"
            )
        self.config = config
        self.context = context
        self.is_first = is_first
        self.is_last = is_last
        if config.z_loss_coeff > 0.0:
            self.loss_names = (*self.loss_names, Z_LOSS)
        self.build_shared(**shared)
        name = type(self).__name__
        check_call(self.build_layer, f"{name}.build_layer", "number")
        check_call(self.losses, f"{name}.losses", "output", "microbatch")
        if self.is_first:
            self.embedding = self.build("embedding", self.build_embedding)
            check_call(self.embedding.forward, f"{type(self.embedding).__name__}.forward", "microbatch")
        built = {str(i): self.build(f"layers.{i}", partial(self.build_layer, i)) for i in layers}
        self.layers = nn.ModuleDict(built)
        for layer in built.values():
            check_call(layer.forward, f"{type(layer).__name__}.forward", "x", *self.layer_arguments)
        if self.is_last:
            self.build_last_part()
        self.initialize()
        self.buffer_specs = {name: buffer_spec(buffer) for name, buffer in self.named_buffers()}

    def build_shared(self) -> None:
        """Build what several layers share, before the layers."""

    def build_embedding(self) -> nn.Module:
        """Return a module that maps a `Microbatch` to ``[s, b, h]``."""
        return Embedding(self.config, self.context)

    @abstractmethod
    def build_layer(self, number: int) -> nn.Module:
        """Return a layer by its number in the whole model.

        It maps ``[s, b, h]`` and a `Microbatch` to ``[s, b, h]``; to `WithTerms` to add terms to the loss.
        """

    def build_head(self) -> nn.Module:
        """Return a module that maps ``[s, b, h]`` to the input of `losses`."""
        return VocabHead(self.config, self.context)

    def build_last_part(self) -> None:
        """Build the modules of a last stage between the last layer and the losses."""
        head = self.build(self.head_name, self.build_head)
        check_call(head.forward, f"{type(head).__name__}.forward", "x")
        self.add_module(self.head_name, head)

    @property
    def last_module(self) -> nn.Module:
        """Return the module that `build_head` has built."""
        return self.get_submodule(self.head_name)

    def last_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters that are used from the call of `last_module` on."""
        return self.last_module.parameters()

    def losses(self, output: Tensor, microbatch: Microbatch) -> Tensor | Mapping[str, Tensor | LossTerm]:
        """Return the sum of the losses of a microbatch's tokens, a scalar, or several terms by name.

        Args:
            output: output of the head: by default logits, ``[s, b, v/tp]``.
        """
        return self.sums_of(self.losses_of(output, microbatch.labels.t()), microbatch)

    def sums_of(self, of_tokens: Tensor, microbatch: Microbatch) -> Tensor | dict[str, LossTerm]:
        """Return the sum of the losses of a microbatch's tokens ``[s, b]``, or both sums of `with_z_loss`."""
        if self.config.z_loss_coeff == 0.0:
            return self.masked_sum(of_tokens, microbatch)
        return self.with_z_loss(of_tokens, microbatch)

    def with_z_loss(self, of_tokens: Tensor, microbatch: Microbatch) -> dict[str, LossTerm]:
        """Return the sums of both losses of a microbatch's tokens ``[s, b, 2]`` as terms."""
        losses, squares = (self.masked_sum(each, microbatch) for each in of_tokens.unbind(-1))
        return {LM_LOSS: LossTerm(losses), Z_LOSS: LossTerm(squares, scale=self.config.z_loss_coeff)}

    @wrap_point
    def losses_of(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each token, ``[s, b]``; with --z-loss-coeff also its z-loss, ``[s, b, 2]``.

        Args:
            output: input of `losses`.
            targets: ``[s, b]``, ids of the tokens to predict; the full sequence, even if sequence parallel.
        """
        return self.losses_of_logits(self.logits_of(output), targets)

    def losses_of_logits(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the losses of tokens ``[...]`` from their logits ``[..., v/tp]``, as `losses_of` does.

        The z-loss is the square of the logarithm of the sum of exponentials (Chowdhery et al. 2022, PaLM,
        section 5).
        """
        if self.config.z_loss_coeff == 0.0:
            return vocab_parallel_cross_entropy(logits, targets, self.vocab_size, self.context.tp)
        losses, log_sums = losses_and_log_sums(logits, targets, self.vocab_size, self.context.tp)
        return torch.stack((losses, log_sums.square()), dim=-1)

    def logits_of(self, output: Tensor) -> Tensor:
        """Map the input of `losses` to this rank's logits, ``[s, b, v/tp]``.

        Columns from `vocab_size` on are padding.
        """
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """Map ``[s, b, h]`` after the last layer to this rank's logits, ``[s, b, v/tp]``."""
        return self.logits_of(self.last_module(hidden))

    @property
    def output_layer(self) -> OutputLayer | None:
        """Return the layer of `logits_of`; None if `last_module` computes the logits."""
        return None

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens in the vocabulary, without padding."""
        assert self.config.vocab_size is not None
        return self.config.vocab_size

    def layer_inputs(self, microbatch: Microbatch) -> tuple[Any, ...]:
        """Return the arguments of each layer besides x, which `layer_arguments` names."""
        return (microbatch,)

    def forward(self, microbatch: Microbatch, hidden: Tensor | None) -> Tensor | WithTerms:
        """Run one microbatch through this stage.

        Args:
            hidden: ``[s, b, h]`` from the previous stage; None on the first stage.

        Returns:
            ``[s, b, h]`` for the next stage; on the last stage the sum of the losses of the microbatch's
            tokens, a scalar. `WithTerms` for further or other terms of the loss, on any stage.
        """
        state = self.last_state(microbatch, hidden)
        x, terms = state.hidden, state.terms
        if not self.is_last:
            message = state.message()
            return WithTerms(message, terms) if terms else message
        losses = self.losses(self.last_module(x), microbatch)
        if terms and isinstance(losses, Tensor):
            losses = {LM_LOSS: losses}
        if not isinstance(losses, Mapping):
            return losses  # a user's mistake is found by a hook of the stage
        of_losses = {
            name: LossTerm(each) if isinstance(each, Tensor) else each for name, each in losses.items()
        }
        return WithTerms(None, add_terms(terms, of_losses))

    def last_state(self, microbatch: Microbatch, hidden: Tensor | None) -> LayerState:
        """Return what this stage's last layer leaves, from a microbatch and `forward`'s hidden states."""
        state = LayerState.of(self.embedding(microbatch)) if hidden is None else self.received(hidden)
        return self.run_layers([*self.layers.values()], state, *self.layer_inputs(microbatch))

    def received(self, message: Tensor) -> LayerState:
        """Return the first layer's input from the previous stage's `LayerState.message`."""
        size = self.config.hidden_size_per_layer_input
        return LayerState.of_message(message, self.config.num_layers, size)

    def hidden_states(self, microbatch: Microbatch, hidden: Tensor | None) -> Tensor:
        """Return the output of this stage's last layer, ``[s, b, h]``, or what the next stage receives."""
        state = self.last_state(microbatch, hidden)
        return state.hidden if self.is_last else state.message()

    def units(self) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
        """Yield the modules in forward's order, each with the parameters used until the next one's call."""
        if self.is_first:
            yield self.embedding, list(self.embedding.parameters())
        for layer in self.layers.values():
            yield layer, list(layer.parameters())
        if self.is_last:
            yield self.last_module, list(self.last_parameters())

    def all_layers(self) -> Iterator[nn.Module]:
        """Yield the layers, also those of modules after the last layer."""
        yield from self.layers.values()

    def prepare_tables(self, seq_length: int) -> None:
        """Build the tables for sequences of this length, for layers that are compiled or offloaded."""

    @property
    def description(self) -> str | None:
        """Return a line about the stage's kernels for the start of the log."""
        return None

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """Return a weight that the first and last stage share; None on other stages."""
        return None

    @property
    def num_tied_gradients(self) -> int:
        """Return how many gradients of `tied_weight` a backward computes, at once or later."""
        return 0 if self.tied_weight is None else 1

    def shared_modules(self) -> dict[str, nn.Module]:
        """Return modules of a first stage that a last stage on the same rank gets as arguments."""
        return {}

    def build(self, name: str, function: Callable[[], nn.Module]) -> nn.Module:
        """Return the module that `function` builds, with initial weights that are the same in every layout.

        Parameters of torch's own modules are replicated over tp and keep the values from torch's generator,
        which is seeded here by `name`.

        Raises:
            UserError: the function does not return a module.
        """
        own, seed = self.context.device, site_key(self.context.seed, name)
        gpus = [own] if own.type == "cuda" and torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=gpus), torch.device("meta" if own.type == "meta" else "cpu"):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed is slow without other devices
            if own.type == "cuda":
                torch.cuda.manual_seed(seed)  # the module may create weights on the GPU
            module = function()
        if not isinstance(module, nn.Module):
            raise UserError(
                f"{type(self).__name__} builds {name} as {kind_of(module)}: return an instance of "
                "torch.nn.Module"
            )
        replicate_parameters(module, self.context)
        return module

    @wrap_point
    def run_layers(self, layers: Sequence[nn.Module], state: LayerState, *inputs: Any) -> LayerState:
        """Run the layers one after the other, from the first one's input to what the last one leaves.

        Args:
            inputs: arguments of each layer besides x.
        """
        for group in self.groups_of(len(layers)):
            state = self.run_group(group, layers, state, *inputs)
        return state

    def groups_of(self, num_layers: int) -> Sequence[range]:
        """Return the indices of the layers that run together, group by group."""
        return self.layer_groups or [range(i, i + 1) for i in range(num_layers)]

    @wrap_point
    def run_group(
        self, group: range, layers: Sequence[nn.Module], state: LayerState, *inputs: Any
    ) -> LayerState:
        """Run the layers of one group; see `run_layers`.

        Args:
            group: indices into `layers`.
        """
        for i in group:
            layer = layers[i]
            output = WithTerms.of(layer(state.hidden, *inputs, *self.own_inputs(layer, state)))
            state = state.after(output, self.checked(output.hidden, state.hidden, layer))
        return state

    def own_inputs(self, layer: nn.Module, state: LayerState) -> tuple[Tensor, ...]:
        """Return arguments of a layer that other layers do not get, after `layer_inputs`."""
        return ()

    def checked(self, y: Any, x: Tensor, layer: nn.Module) -> Tensor:
        """Return the output y of a layer whose input is x.

        Raises:
            UserError: it is not a tensor with the shape of x.
        """
        if isinstance(y, Tensor) and y.shape == x.shape:
            return y
        returned = f"shape {list(y.shape)}" if isinstance(y, Tensor) else kind_of(y)
        error = UserError(
            f"{type(layer).__name__}.forward returns {returned} for hidden states of shape "
            f"{list(x.shape)}: return a tensor of the same shape, [s, b, h]"
        )
        error.on_one_rank = not self.is_first  # rank 0, which reports for all, has the first stage
        raise error

    def tables(self) -> Iterable[Tensor]:
        """Return the tensors of the stage that layers compute with, besides parameters."""
        return self.buffers()

    def initialize(self) -> None:
        """Fill all parameters with their initial values; call it once all modules are built."""
        has_memory = self.context.has_weights and self.context.has_memory
        if has_memory and self.context.device.type != "meta":
            initialize(self, self.context.seed, self.context.topology)

    def masked_sum(self, losses: Tensor, microbatch: Microbatch) -> Tensor:
        """Sum the losses ``[s, b]`` of the tokens that `loss_mask` selects; return a scalar.

        Raises:
            UserError: the losses have another shape.
        """
        if losses.shape != (microbatch.labels.shape[1], microbatch.labels.shape[0]):
            raise UserError(
                f"masked_sum got losses of shape {list(losses.shape)}, and the microbatch has "
                f"{list(microbatch.labels.t().shape)} labels [s, b]: pass the loss of each token"
            )
        if microbatch.loss_mask is not None:
            losses = losses.where(microbatch.loss_mask.t(), 0.0)
        return losses.sum()


SequentialStage = Stage
"""Public name of `Stage`, for models of your own."""

StageProvider = Callable[..., Stage]
"""Builds a pipeline stage: a subclass of `Stage`, or a function with these arguments.

config, context: see `Stage`.
layers: numbers of the stage's layers in the whole model.
is_first, is_last: by keyword; see `Stage`.
Others by keyword: the first stage's `shared_modules`, if this rank holds both the first and last stage.
"""


def provider_name(provider: StageProvider) -> str:
    """Return the name of a class or function, for messages."""
    return getattr(provider, "__qualname__", None) or type(provider).__name__


def is_own_model(provider: StageProvider | None) -> bool:
    """Return whether a model is the program's own; None means the model of the config."""
    return provider is not None and not str(getattr(provider, "__module__", "")).startswith("megalite.")


def check_model_provider(provider: StageProvider) -> None:
    """Check that a model provider can be called like `StageProvider`.

    Raises:
        UserError: it cannot.
    """
    name = provider_name(provider)
    if not callable(provider) or (isinstance(provider, type) and not issubclass(provider, Stage)):
        raise UserError(
            f"the model provider is {kind_of(provider)}: pass a subclass of GPT or SequentialStage, or a "
            "function with the same arguments"
        )
    if missing := sorted(getattr(provider, "__abstractmethods__", ())):
        raise UserError(f"{name} lacks {', '.join(missing)}: define each in the class")
    check_call(provider, name, "config", "context", "layers", keywords=("is_first", "is_last"))
