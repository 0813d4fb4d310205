"""Apply the user's settings to a converted model; find its parameters and dtypes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config import Config, DataConfig, ModelConfig, TrainingConfig, to_yaml
from megalite.config.data import TOKENIZER_FIELDS
from megalite.config.fields import inactive_options
from megalite.config.model.transformer import ParamsDtype
from megalite.config.option import flag_of
from megalite.config.validate import problems_of
from megalite.distributed.topology import Topology
from megalite.frontends.command_line import NEEDED_TO_TRAIN, parse
from megalite.model.bert_stage import STAGES
from megalite.model.stage import DTYPES
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, buffer_spec, spec_of
from megalite.utils.errors import ConfigError, UserError
from megalite.utils.log import log


def without_training_buffers(config: ModelConfig) -> ModelConfig:
    """Return the config of the same model without buffers that only training reads."""
    if config.moe_router_load_balancing_type != "global_aux_loss":
        return config
    return replace(config, moe_router_load_balancing_type="none")


def parameters_of(config: ModelConfig) -> dict[str, ParameterSpec]:
    """Return every parameter and buffer of the whole model, as one rank would hold it, layer by layer.

    Buffers that only training reads are not among them.

    Raises:
        UserError: the vocabulary size is unknown.
    """
    context = LayerContext(Topology.alone(), DTYPES[config.params_dtype], has_weights=False)
    config = without_training_buffers(config)
    stage = STAGES[config.architecture](config, context, range(config.num_layers))
    names = {name for name, _ in (*stage.named_parameters(), *stage.named_buffers())}
    return {
        name: spec_of(tensor) if isinstance(tensor, nn.Parameter) else buffer_spec(tensor)
        for name, tensor in stage.state_dict(keep_vars=True).items()
        if name in names
    }


def precision_of(dtype: torch.dtype) -> ParamsDtype:
    """Return our name for a dtype.

    Raises:
        UserError: our models cannot have weights of this dtype.
    """
    for name, known in DTYPES.items():
        if known == dtype:
            return name  # type: ignore[return-value]  # a key of the table
    raise UserError(f"{dtype} weights cannot be converted: {', '.join(map(str, DTYPES.values()))} can")


def loses_digits(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether numbers of one dtype are rounded in the other."""
    return torch.promote_types(source, target) != target


def rounded(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in another dtype.

    Raises:
        UserError: a number is too large for the dtype.
    """
    if tensor.dtype == dtype:
        return tensor
    converted = tensor.to(dtype)
    if loses_digits(tensor.dtype, dtype) and not torch.equal(converted.isinf(), tensor.isinf()):
        raise UserError(f"{name} has numbers too large for {dtype}: choose another --params-dtype")
    return converted


_WHOLE_MODEL = ("--num-layers", "--preset", "--config")

_PRECISION = ("--params-dtype", "--bf16", "--fp16")


@dataclass(frozen=True)
class Settings:
    """User's flags of megalite train for the model and its tokenizer."""

    flags: Sequence[str] = ()

    @property
    def describe_model(self) -> bool:
        """Return whether the flags describe a whole model, not only changes to one."""
        return self._has(_WHOLE_MODEL)

    @property
    def change_tokenizer(self) -> bool:
        """Return whether the flags name a tokenizer other than the source's."""
        return self._has([flag_of(name) for name in TOKENIZER_FIELDS])

    @property
    def set_vocab_size(self) -> bool:
        """Return whether the flags say how many rows the tables of the vocabulary have."""
        return self._has(("--vocab-size",))

    def applied(self, base: Config) -> Config:
        """Return the config of a source with the flags applied.

        Raises:
            ConfigError: with all mistakes in the flags and in the resulting model.
        """
        config = self._parsed(base) if self.flags else base
        model = config.model
        if not self._has(_PRECISION):
            model = replace(model, params_dtype=base.model.params_dtype)
        if model.vocab_size is None:
            model = replace(model, vocab_size=base.model.vocab_size)
        check_model(model)
        return replace(config, model=model)

    def _parsed(self, base: Config) -> Config:
        if self.change_tokenizer:
            nothing: dict[str, Any] = dict.fromkeys(TOKENIZER_FIELDS)
            base = replace(base, data=replace(base.data, **nothing))
        if self.describe_model:
            config, _ = parse(self.flags, NEEDED_TO_TRAIN)
            base = Config()
        else:
            with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
                file.write(to_yaml(base))
                file.flush()
                config, _ = parse(["--config", file.name, *self.flags], NEEDED_TO_TRAIN)
        if not self._has(("--config",)):
            _report_unused(config, base)
        return config

    def _has(self, flags: Sequence[str]) -> bool:
        names = {flag.partition("=")[0].replace("_", "-") for flag in self.flags}
        return not names.isdisjoint(flags)


def _report_unused(config: Config, base: Config) -> None:
    """Warn about flags without effect on this model, and refuse those without effect on any conversion."""
    used, before = {*TOKENIZER_FIELDS, *(field.name for field in fields(ModelConfig))}, base.values()
    unused = [
        flag_of(name) for name, value in config.values().items() if value != before[name] and name not in used
    ]
    if unused:
        raise UserError(f"{', '.join(unused)}: a conversion does not use it, remove it")
    for name, reason in inactive_options(config.model).items():
        if getattr(config.model, name) != before[name]:
            log.warning("%s has no effect: %s", flag_of(name), reason)


def check_model(model: ModelConfig) -> None:
    """Refuse a model that cannot be trained on one rank, after filling in fields that only training needs."""
    trained = Config(model=model, data=DataConfig(mock_data=True), training=TrainingConfig(train_iters=1))
    if problems := problems_of(trained, 1):
        raise ConfigError(problems)
