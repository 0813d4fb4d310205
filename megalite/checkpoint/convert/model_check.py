"""Run the models before and after a conversion on the same tokens, and compare what each layer computes.

Both models run in fp32. A module's parameters are read from the files when it runs, and freed after it, so
memory holds one layer, or one table of the vocabulary. Shapes: s tokens, h hidden size, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from megalite.checkpoint.convert.formats import ConversionSource
from megalite.checkpoint.convert.hf_folder import HFFolder
from megalite.checkpoint.convert.model_settings import without_training_buffers
from megalite.config import ModelConfig
from megalite.data.microbatch import LayerState, Microbatch
from megalite.distributed.topology import Topology
from megalite.frontends.huggingface.families import family_of, hf_config_of
from megalite.model.bert_stage import STAGES, BertStage
from megalite.tensor_parallel.parameter_spec import LayerContext, spec_of
from megalite.utils.errors import UserError, few, first_line
from megalite.utils.log import LineInterval, log

TOLERANCE = 1e-4
"""Largest difference of two outputs of a token, as a fraction of their norm.

In models of 32 layers with random weights, rounding in fp32 makes a difference of 1e-6 to 1.4e-5. A
norm_epsilon of 1e-5 instead of 1e-6 makes one from 1e-4, another rotary_base one from 5e-3. The two forms of
GELU differ by 2e-5 to 4e-4, so initial weights may hide them. It is measured per token, because the
outputs of a first token can be a thousand times as large as the others.
"""
MAX_TOKENS = 32
EMBEDDING, LOGITS, ORDER_SCORES = "the embedding", "the logits", "the scores of the segment order"

ModelOutputs = Iterator[tuple[str, Tensor]]
"""Outputs of a model's parts by name, in the order of forward: ``[s, h]``, ``[s, v]`` or ``[2]``."""


@dataclass(frozen=True)
class CheckInput:
    """Input of both models.

    Attributes:
        tokens, token_types: ``[1, s]``.
        dtype: dtype to which the conversion rounds parameters.
    """

    tokens: Tensor
    token_types: Tensor
    dtype: torch.dtype

    @staticmethod
    def of(config: ModelConfig, dtype: torch.dtype) -> CheckInput:
        """Return random tokens for a model, always the same."""
        assert config.vocab_size is not None
        generator = torch.Generator().manual_seed(1)
        shape = (1, min(MAX_TOKENS, config.seq_length))
        tokens = torch.randint(config.vocab_size, shape, generator=generator)
        types = torch.randint(max(config.num_token_types, 1), shape, generator=generator)
        return CheckInput(tokens, types, dtype)

    def rounded(self, stored: Tensor) -> Tensor:
        """Return a stored parameter as the conversion rounds it, in fp32."""
        return stored.to(self.dtype).float()


def run_megalite(source: ConversionSource, check_input: CheckInput, per_layer: int = 1) -> ModelOutputs:
    """Yield the outputs of megalite's model with the parameters of a source.

    Args:
        per_layer: number of its layers that are one layer of the other model.
    """
    config = replace(without_training_buffers(source.config.model), params_dtype="fp32")
    topology = replace(Topology.alone(), device=torch.device("cpu"))
    context = LayerContext(topology, torch.float32, has_documents=not config.is_causal, has_weights=False)
    stage = STAGES[config.architecture](config, context, range(config.num_layers))
    stage.eval()
    name_of = {parameter: name for name, parameter in stage.named_parameters()}

    def load(parameter: nn.Parameter) -> Tensor:
        full = check_input.rounded(source.tensor(name_of[parameter]))
        padding = full.new_zeros(spec_of(parameter).num_padding, *full.shape[1:])
        return torch.cat((full, padding)) if len(padding) else full

    for name, buffer in stage.named_buffers():
        buffer.copy_(source.tensor(name))
    documents = None if config.is_causal else torch.zeros_like(check_input.tokens)
    types = check_input.token_types if config.num_token_types else None
    batch = Microbatch(
        *(check_input.tokens, check_input.tokens, torch.zeros(1, dtype=torch.long)),
        document_ids=documents,
        token_types=types,
    )
    with filled(stage, stage.embedding.parameters(), load):
        state = LayerState.of(stage.embedding(batch))
    yield EMBEDDING, state.hidden[:, 0]  # of [s, 1, h]
    inputs = stage.layer_inputs(batch)
    for number, layer in enumerate(stage.layers.values()):
        with filled(stage, layer.parameters(), load):
            state = stage.run_group(range(1), [layer], state, *inputs)
        if (number + 1) % per_layer == 0:
            yield f"layer {number // per_layer}", state.hidden[:, 0]
    with filled(stage, stage.last_parameters(), load):
        normed = stage.last_module(state.hidden)
        logits = stage.logits_of(normed)[:, 0, : config.vocab_size]
        outputs = [(LOGITS, logits)]
        if isinstance(stage, BertStage) and stage.order_head is not None:
            outputs.append((ORDER_SCORES, stage.order_scores(normed)[0]))
    yield from outputs


def load_in_transformers(folder: Path, config: ModelConfig) -> None:
    """Load a written folder with transformers' own reader on device meta, without memory for weights.

    Args:
        config: the model, for its family.

    Raises:
        UserError: transformers cannot load it, or finds no tensor for a parameter.
    """
    import transformers
    from transformers.utils import logging

    (class_name,) = hf_config_of(config, recorded=HFFolder(folder).config)["architectures"]
    had_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        _, found = getattr(transformers, class_name).from_pretrained(
            folder, device_map="meta", local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # as in run_transformers
        raise UserError(
            f"transformers {transformers.__version__} cannot load {folder}: {first_line(error)}; "
            "--no-check converts without loading it"
        ) from error
    finally:
        if had_bar:
            logging.enable_progress_bar()
    if missing := sorted(map(str, found["missing_keys"])):
        raise UserError(
            f"transformers {transformers.__version__} finds no weights for {few(missing)} in {folder}; "
            "--no-check converts without loading it"
        )


def run_transformers(folder: Path, config: ModelConfig, check_input: CheckInput) -> ModelOutputs:
    """Yield the outputs of transformers' model of a Hugging Face folder.

    Args:
        config: the model, for its family.

    Raises:
        UserError: transformers cannot read or run the model.
    """
    import transformers

    try:
        yield from _run_transformers(folder, config, check_input)
    except UserError:
        raise
    except Exception as error:  # another version, or a damaged folder, can make it raise anything
        raise UserError(
            f"transformers {transformers.__version__} cannot run {folder}: {first_line(error)}; "
            "--no-check converts without running it"
        ) from error


def _run_transformers(folder: Path, config: ModelConfig, check_input: CheckInput) -> ModelOutputs:
    import transformers

    files = HFFolder(folder)
    family = family_of(config, files.config.get("model_type"))
    # A file may have a name of the family that transformers does not know (Kimi K2).
    theirs = transformers.CONFIG_MAPPING[family.model_type].from_pretrained(
        folder, attn_implementation="eager", local_files_only=True
    )
    theirs._experts_implementation = "eager"  # their fused GEMMs need sizes that are multiples of 16 bytes
    # BLOOM's sums in slices leave out the biases of the sliced layers, so they are no reference.
    theirs.slow_but_exact = False
    (class_name,) = hf_config_of(config, recorded=files.config)["architectures"]
    with parameters_on_meta():
        model = getattr(transformers, class_name)(theirs).eval()
    in_file = {family.full_name(name): name for name in files.files}
    names = dict[nn.Parameter, list[list[tuple[str, ...]]]]()  # a tied weight has several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(family.names_in_files(name, config.num_experts or 1))

    def load(parameter: nn.Parameter) -> Tensor:
        found = [
            each for each in names[parameter] if all(part in in_file for parts in each for part in parts)
        ]
        if not found:
            ((first, *_), *_) = names[parameter][0]
            raise UserError(f"{folder} lacks {first}, which transformers' {class_name} reads")
        whole = [torch.cat([files.tensor(in_file[part]) for part in parts]) for parts in found[0]]
        return check_input.rounded(whole[0] if len(whole) == 1 else torch.stack(whole))

    for name, buffer in model.named_buffers():
        if (stored := in_file.get(family.full_name(name))) is not None:
            tensor = files.tensor(stored)
            is_parameter = name.endswith("layer_scalar")  # of ours, which the conversion rounds
            buffer.copy_(check_input.rounded(tensor) if is_parameter else tensor)
    in_file_prefix = family.layer[0].theirs[0].split(".{}")[0]
    prefix = f"{model.base_model_prefix}.{in_file_prefix.partition('.')[2]}"  # as the module has it
    layers = list(model.get_submodule(prefix))
    outputs = list[tuple[str, Tensor]]()
    layers[0].register_forward_pre_hook(lambda _, inputs: outputs.append((EMBEDDING, inputs[0][0])))
    interval = LineInterval()
    for number, layer in enumerate(layers):
        layer.register_forward_hook(_recorder(f"layer {number}", outputs, interval))
        _fill_in_forward(model, layer, list(layer.parameters()), load)
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own and not name.startswith(prefix + "."):
            _fill_in_forward(model, module, own, load)
    types = {"token_type_ids": check_input.token_types} if config.num_token_types else {}
    no_cache = {"use_cache": False} if config.is_causal else {}
    result = model(input_ids=check_input.tokens, **types, **no_cache)
    yield from outputs
    has_order = hasattr(result, "seq_relationship_logits")
    yield LOGITS, (result.prediction_logits if has_order else result.logits)[0]
    if has_order:
        yield ORDER_SCORES, result.seq_relationship_logits[0]


def _recorder(name: str, outputs: list[tuple[str, Tensor]], interval: LineInterval) -> Callable[..., None]:
    def record(_module: nn.Module, _inputs: Any, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs.append((name, (output if isinstance(output, Tensor) else output[0])[0]))
        if interval.is_over():
            log.info("check: transformers has run %s", name)

    return record


def _fill_in_forward(
    model: nn.Module,
    module: nn.Module,
    parameters: list[nn.Parameter],
    load: Callable[[nn.Parameter], Tensor],
) -> None:
    """Make a module's forward read its parameters, and free them at its end."""
    forward = module.forward

    def filled_forward(*args: Any, **more: Any) -> Any:
        with filled(model, parameters, load):
            return forward(*args, **more)

    module.forward = filled_forward


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules within the block whose parameters are on device meta, and whose buffers are not."""

    def moved(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:
            return None  # keep it: a tied weight stays the same object
        return nn.Parameter(parameter.data.to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(moved)  # type: ignore[arg-type]  # torch allows it
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def filled(
    model: nn.Module, parameters: Iterable[nn.Parameter], load: Callable[[nn.Parameter], Tensor]
) -> Iterator[None]:
    """Replace parameters on device meta, wherever the model holds them, by loaded ones within the block."""
    loaded = {parameter: nn.Parameter(load(parameter), requires_grad=False) for parameter in parameters}
    held = [
        (owner, name, parameter)
        for owner in model.modules()
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
        if parameter in loaded
    ]
    for owner, name, parameter in held:
        setattr(owner, name, loaded[parameter])
    try:
        yield
    finally:
        for owner, name, parameter in held:
            setattr(owner, name, parameter)


@torch.no_grad()
def check_same(first: ModelOutputs, second: ModelOutputs, num_tokens: int, cause: str) -> None:
    """Check that two models compute the same, and log the largest difference of their logits.

    Args:
        first, second: `second` runs only up to the first difference.
        cause: a cause to name beside the usual ones; empty for none.

    Raises:
        UserError: an output differs by more than rounding; the message names the first.
    """
    interval, expected = LineInterval(), list(first)
    for (name, theirs), (_, ours) in zip(expected, second, strict=True):
        columns = min(theirs.shape[-1], ours.shape[-1])
        theirs, ours = theirs[..., :columns], ours[..., :columns]
        if not (theirs.isfinite().all() or ours.isfinite().all()):
            log.warning(
                "check: both models have NaN or infinity in the output of %s, so the rest is not compared",
                name,
            )
            return
        largest = (theirs - ours).abs().max()
        relative = ((theirs - ours).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-30)).max()
        if not relative <= TOLERANCE:
            raise UserError(
                "the converted model computes something else, and was not kept: the first difference is in "
                f"the output of {name}, up to {largest:.2e} where values are up to {theirs.abs().max():.2e} "
                f"(relative {relative:.1e}, tolerance {TOLERANCE:.0e}); {_cause(name)}{cause}; --no-check "
                "converts without this comparison"
            )
        if name == LOGITS:
            log.info(
                "check: the models before and after agree: on %d tokens in fp32, logits up to %.2e differ by "
                "up to %.1e",
                *(num_tokens, theirs.abs().max(), largest),
            )
        if interval.is_over():
            log.info("check: %s is the same", name)


def _cause(name: str) -> str:
    if name == EMBEDDING:
        return "the likely cause is a table or norm of the embedding"
    if name == "layer 0":
        return (
            "the likely cause is a setting of all layers (norm_epsilon, activation, rotary_base, number of "
            "heads) or how a kind of weight is mapped"
        )
    if name in (LOGITS, ORDER_SCORES):
        return "the likely cause is the final norm, the output weight or a head"
    return f"the layers before agree, so the likely cause is the weights of {name}"
