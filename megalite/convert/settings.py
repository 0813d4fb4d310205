"""What a user says about a model that is converted, over what the source says of itself."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from megalite.cli import parse
from megalite.config import Config, DataConfig, TrainingConfig, to_yaml
from megalite.config.data import TOKENIZER_FIELDS
from megalite.config.flags import flag_of
from megalite.config.validate import problems_of
from megalite.errors import ConfigError, UserError

_WHOLE_MODEL = ("--num-layers", "--preset", "--config")
_UNNEEDED = ("train_iters", "mock_data", "tokenizer_type")
"""A conversion has no length and no data, and the vocabulary's size comes from the source."""
_PRECISION = ("--params-dtype", "--bf16", "--fp16")


@dataclass(frozen=True)
class Settings:
    """Flags of pretrain_gpt.py for the model and its tokenizer."""

    flags: Sequence[str] = ()

    @property
    def describe_model(self) -> bool:
        """Whether they say a model, rather than change some of one."""
        return self._has(_WHOLE_MODEL)

    @property
    def change_tokenizer(self) -> bool:
        """Whether they name another tokenizer than the source's."""
        return self._has([flag_of(name) for name in TOKENIZER_FIELDS])

    def applied(self, base: Config) -> Config:
        """The config of a source with the flags over it.

        Raises:
            ConfigError: with all mistakes: of the flags, and of the model that they make.
        """
        config = self._parsed(base) if self.flags else base
        model = config.model
        if not self._has(_PRECISION):
            model = replace(model, params_dtype=base.model.params_dtype)
        if model.vocab_size is None:
            model = replace(model, vocab_size=base.model.vocab_size)
        _check_model(replace(config, model=model))
        return replace(config, model=model)

    def _parsed(self, base: Config) -> Config:
        if self.change_tokenizer:
            nothing: dict[str, Any] = dict.fromkeys(TOKENIZER_FIELDS)
            base = replace(base, data=replace(base.data, **nothing))
        if self.describe_model:
            config, _ = parse(self.flags, _UNNEEDED)
            base = Config()
        else:
            with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
                file.write(to_yaml(base))
                file.flush()
                config, _ = parse(["--config", file.name, *self.flags], _UNNEEDED)
        if not self._has(("--config",)):
            _refuse_idle(config, base)
        return config

    def _has(self, flags: Sequence[str]) -> bool:
        names = {flag.partition("=")[0].replace("_", "-") for flag in self.flags}
        return not names.isdisjoint(flags)


def _refuse_idle(config: Config, base: Config) -> None:
    """Refuses flags that change nothing of a conversion."""
    idle = [
        flag_of(field.name)
        for group in fields(config)
        if group.name != "model"
        for field in fields(getattr(config, group.name))
        if getattr(getattr(config, group.name), field.name) != getattr(getattr(base, group.name), field.name)
        and field.name not in TOKENIZER_FIELDS
    ]
    if idle:
        raise UserError(f"{', '.join(idle)}: a conversion has no use for it, leave it out")


def _check_model(config: Config) -> None:
    """Refuses a model that could not be trained on one rank; what only training needs is not asked."""
    asked = Config(
        model=config.model, data=DataConfig(mock_data=True), training=TrainingConfig(train_iters=1)
    )
    if problems := problems_of(asked, 1):
        raise ConfigError(problems)
