"""The config of a judgement: which flags it reads, refuses and names."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import pytest

from megalite.cli.judge import judge_config
from megalite.config import Config, OptimizerConfig
from megalite.observe.judge.program import refuse_unmapped
from megalite.utils.errors import UserError
from megalite.utils.log import configure_logging

OTHER = {"optimizer": "muon", "lr_decay_style": "cosine", "exp_avg_dtype": "fp16", "loss_scale": 2.0}


def test_flags_without_effect_are_named_and_have_none(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(rank=0)
    flags = ("--save", "here", "--train-iters", "7", "--data-path", "nowhere", "--hidden-dropout", "0.1")
    config = judge_config(flags, 2, ModuleType("script"))
    log = capsys.readouterr().out
    assert "without effect in a judgement: --data-path, --save, --train-iters" in log
    assert "dropout is switched off: hidden_dropout" in log
    assert (config.checkpoint.save, config.data.data_path, config.training.train_iters) == (None, (), 2)
    assert config.model.hidden_dropout == 0.0


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(OptimizerConfig)])
def test_an_option_of_the_optimizer_is_passed_on_or_refused(name: str) -> None:
    default = getattr(OptimizerConfig(), name)
    value = OTHER.get(name, not default if isinstance(default, bool) else 0.125)
    optimizer = dataclasses.replace(OptimizerConfig(lr_decay_style="constant"), **{name: value})
    config = Config(optimizer=optimizer)
    refuse_unmapped(config, "a package", name)
    if name in {"lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"}:
        refuse_unmapped(config, "a package")
    else:
        with pytest.raises(UserError, match="is not judged with a package: leave it out"):
            refuse_unmapped(config, "a package")
