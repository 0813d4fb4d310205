"""Mistakes in models, datasets, callbacks and loops of a program's own: one line each, as users meet them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from torch import nn

import megalite
from megalite import DatasetSplits, FieldSamples, Topology, UserError
from megalite.train.loop import HOOKS
from megalite.train.own_model import record_verified, warn_if_unverified
from megalite.train.run_context import resolve_run
from tests.end_to_end.conftest import signals_restored
from tests.programs import run_program

S, VOCABULARY = 16, 64
FLAGS = (
    *("--preset", "gpt-tiny", "--num-layers", "2", "--vocab-size", str(VOCABULARY), "--seq-length", str(S)),
    *("--train-iters", "2", "--global-batch-size", "2", "--micro-batch-size", "2", "--eval-iters", "0"),
)


class Layer(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Any, microbatch: Any) -> Any:
        return x + self.linear(x)


class Model(megalite.SequentialStage):
    def build_layer(self, number: int) -> nn.Module:
        return Layer(self.config.hidden_size)


class Tokens:
    """A dataset of zeros, but for what a function returns in place of sample 3."""

    def __init__(self, third: Callable[[], Any] = lambda: np.zeros(S + 1, np.int64)) -> None:
        self.third = third

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return self.third() if index == 3 else np.zeros(S + 1, np.int64)


def _train(*flags: str, **parts: Any) -> None:
    """Train in this process to the end of the run."""
    with signals_restored():
        with pytest.raises(SystemExit) as end:
            megalite.pretrain(**parts, arguments=[*FLAGS, *flags])
        assert end.value.code == 0


def _model(name: str, method: str, function: Callable[..., Any], base: type = Model) -> type:
    """Return a subclass of `base` with one method of its own."""
    return type(name, (base,), {method: function})


def _layer(forward: Callable[..., Any]) -> type:
    layer = type("OwnLayer", (Layer,), {"forward": forward})
    return _model("OwnModel", "build_layer", lambda self, number: layer(self.config.hidden_size))


def _frozen(model: Any, number: int) -> nn.Module:
    layer = Layer(model.config.hidden_size)
    layer.linear.bias.requires_grad_(False)
    return layer


def _token_losses(model: Any, normed: Any, microbatch: Any) -> Any:
    return model.losses_of(normed, microbatch.labels.t())


MODELS = {
    "an instance": (object(), "the model provider is a object: pass a subclass of GPT or SequentialStage"),
    "a module": (nn.Linear, "the model provider is the class Linear: pass a subclass of GPT"),
    "another signature": (
        lambda config: None,
        r"<lambda>\(config\) is called as <lambda>\(config, context, la",
    ),
    "nothing returned": (
        lambda *args, **more: None,
        "<lambda> returns None: return the Stage that it builds",
    ),
    "an abstract class": (megalite.SequentialStage, "Stage lacks build_layer: define"),
    "no layer": (
        _model("OwnModel", "build_layer", lambda self, number: None),
        r"OwnModel builds layers.0 as None: return an instance of torch.nn.Module",
    ),
    "a layer's class": (
        _model("OwnModel", "build_layer", lambda self, number: Layer),
        "OwnModel builds layers.0 as the class Layer: return an instance",
    ),
    "build_layer without a number": (
        _model("OwnModel", "build_layer", lambda self: Layer(64)),
        r"OwnModel.build_layer\(\) is called as OwnModel.build_layer\(number\): too many positional",
    ),
    "build_layer of a GPT without a number": (
        _model("OwnGPT", "build_layer", lambda self: Layer(64), megalite.GPT),
        r"OwnGPT.build_layer\(\) is called as OwnGPT.build_layer\(number\)",
    ),
    "a layer of torch's": (
        _model("OwnModel", "build_layer", lambda self, number: nn.Linear(64, 64)),
        r"Linear.forward\(.*is called as Linear.forward\(x, microbatch\)",
    ),
    "losses of other arguments": (
        _model("OwnModel", "losses", lambda self, output: output.sum()),
        r"OwnModel.losses\(output\) is called as OwnModel.losses\(output, microbatch\)",
    ),
    "a layer that returns nothing": (
        _layer(lambda self, x, microbatch: None),
        r"OwnLayer.forward returns None for hidden states of shape \[16, 2, 64\]",
    ),
    "a layer that returns another shape": (
        _layer(lambda self, x, microbatch: x[:-1]),
        r"OwnLayer.forward returns shape \[15, 2, 64\] for hidden states of shape \[16, 2, 64\]",
    ),
    "a loss for each token": (
        _model("OwnGPT", "losses", _token_losses, megalite.GPT),
        r"OwnGPT returns a loss of shape \[16, 2\]: return the sum of the losses",
    ),
    "no loss": (
        _model("OwnGPT", "losses", lambda *_: None, megalite.GPT),
        "OwnGPT returns None from forward: return the sum of the losses, a scalar",
    ),
    "a loss without a gradient": (
        _model("OwnGPT", "losses", lambda *args: _token_losses(*args).sum().detach(), megalite.GPT),
        "OwnGPT returns a loss without a gradient",
    ),
    "a term without a name": (
        _layer(lambda self, x, microbatch: megalite.WithTerms(x, {"own_loss": megalite.LossTerm(x.sum())})),
        r"OwnModel returns the term own_loss of the loss: name it in the class, loss_names = "
        r"\('lm_loss', 'own_loss'\)",
    ),
    "a term of another type": (
        _model("OwnGPT", "losses", lambda *args: {"lm_loss": 1.0}, megalite.GPT),
        "OwnGPT returns a float as the term lm_loss of the loss: return a LossTerm of a tensor",
    ),
    "a model without lm_loss": (
        _model("OwnGPT", "loss_names", ("own_loss",), megalite.GPT),
        r"loss_names of OwnGPT is \('own_loss',\): name all terms of the loss, the first 'lm_loss'",
    ),
    "a mean passed to masked_sum": (
        _model(
            "OwnGPT",
            "losses",
            lambda self, normed, batch: self.masked_sum(_token_losses(self, normed, batch).mean(), batch),
            megalite.GPT,
        ),
        r"masked_sum got losses of shape \[\], and the microbatch has \[16, 2\] labels",
    ),
    "a frozen parameter": (
        _model("OwnModel", "build_layer", _frozen),
        r"layers.0.linear.bias, layers.1.linear.bias of OwnModel: requires_grad is False",
    ),
}


def test_mup_without_layers_that_know_it() -> None:
    with pytest.raises(UserError, match=r"^--mup-base-width 4 has no effect on Model: pass width_ratio="):
        _train("--mock-data", "--mup-base-width", "4", model_provider=Model)


@pytest.mark.parametrize(("model", "message"), MODELS.values(), ids=MODELS)
def test_mistakes_of_a_model(model: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}") as caught:
        _train("--mock-data", model_provider=model)
    assert len(str(caught.value).splitlines()) == 1


class Fields(Tokens):
    """Samples with fields, but for what a function returns in place of sample 3."""

    def __getitem__(self, index: int) -> Any:
        return self.third() if index == 3 else _fields()


def _fields(**changes: Any) -> dict[str, Any]:
    zeros = np.zeros(S, np.int64)
    return {"tokens": zeros, "labels": zeros, "loss_mask": zeros == 0, "is_real": zeros == 0, **changes}


def _of(dataset: Any) -> Callable[[Any], DatasetSplits]:
    return lambda run: DatasetSplits(dataset, None, None)


DATASETS = {
    "an instance": (
        DatasetSplits(Tokens(), None, None),
        None,
        "the dataset provider is a DatasetSplits: pass",
    ),
    "another signature": (lambda: None, None, r"<lambda>\(\) is called as <lambda>\(run\)"),
    "nothing returned": (lambda run: None, None, "the dataset provider returns None: return DatasetSplits"),
    "no length": (_of(iter([])), None, "the train dataset is a list_iterator: it needs the methods __len__"),
    "no training data": (_of(None), None, "the dataset provider returned no training dataset"),
    "too few samples": (_of([0]), None, r"the train dataset has 1 samples, and the run reads 4: let Epochs"),
    "samples of a class": (
        _of(Fields()),
        FieldSamples,
        "samples is the class FieldSamples: pass an instance",
    ),
    "a later sample is short": (
        _of(Tokens(lambda: np.zeros(S, np.int64))),
        None,
        r"sample 3 of the train dataset has shape \[16\] in int64: it needs shape \[17\] in int64, one token",
    ),
    "a later sample has another type": (
        _of(Tokens(lambda: np.zeros(S + 1, np.float32))),
        None,
        r"sample 3 of the train dataset has shape \[17\] in float32: it needs shape \[17\] in int64",
    ),
    "a later sample has unknown tokens": (
        _of(Tokens(lambda: np.arange(100, 100 + S + 1))),
        None,
        "sample 3 of the train dataset has token ids from 100 to 116, and the vocabulary has 64: make",
    ),
    "a field is missing": (
        _of(Fields(lambda: {"tokens": np.zeros(S, np.int64)})),
        FieldSamples(),
        "sample 3 of the train dataset is the fields tokens: it needs the fields tokens, labels, loss_mask",
    ),
    "labels without a loss are negative": (
        _of(Fields(lambda: _fields(labels=np.full(S, -100)))),
        FieldSamples(),
        "labels of sample 3 of the train dataset has token ids from -100 to -100.* loss_mask to False there",
    ),
    "padding in numbers": (
        _of(Fields(lambda: _fields(is_real=np.ones(S, np.int64)))),
        FieldSamples(("tokens", "labels", "loss_mask", "is_real")),
        r"is_real of sample 3 of the train dataset has shape \[16\] in int64: it needs .* in bool",
    ),
    "a mask of numbers": (
        _of(Fields(lambda: _fields(loss_mask=np.ones(S)))),
        FieldSamples(),
        r"loss_mask of sample 3 of the train dataset has shape \[16\] in float64: it needs .* in bool",
    ),
}


def test_padding_without_a_loss_mask_is_refused() -> None:
    with pytest.raises(UserError, match="is_real and no loss_mask, so that padding would have a loss: add"):
        FieldSamples(("tokens", "labels", "is_real"))


@pytest.mark.parametrize(("provider", "samples", "message"), DATASETS.values(), ids=DATASETS)
def test_mistakes_of_a_dataset(provider: Any, samples: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}") as caught:
        _train(dataset_provider=provider, samples=samples)
    assert len(str(caught.value).splitlines()) == 1


def test_a_dataset_of_ones_own_may_read_the_corpus_of_the_command_line(corpus: str) -> None:
    seen: list[Any] = []

    def datasets(run: megalite.RunContext) -> DatasetSplits:
        data = run.config.data
        seen.append((data.data_path, data.split))
        return DatasetSplits(Tokens(), None, None)

    _train("--data-path", corpus, "--split", "8,1,1", dataset_provider=datasets)
    assert seen == [((corpus,), "8,1,1")]


class Nothing(megalite.Callback):
    def after_iter(self, loop: Any, result: Any) -> None:
        pass


class OneArgument(megalite.Callback):
    def after_step(self, loop: Any) -> None:
        pass


CALLBACKS = {
    "no list": (OneArgument(), "callbacks is a OneArgument: pass a list of callbacks"),
    "a class": ([OneArgument], "callbacks holds the class OneArgument: pass instances"),
    "a function": ([print], "callbacks holds a builtin_function_or_method: pass instances"),
    "no hook": (
        [Nothing()],
        "Nothing overrides no hook of Callback: define one of running, on_start, before_",
    ),
    "another signature": (
        [OneArgument()],
        r"OneArgument.after_step\(.*\) is called as OneArgument.after_step\(loop, result\): too many",
    ),
}


@pytest.mark.parametrize(("callbacks", "message"), CALLBACKS.values(), ids=CALLBACKS)
def test_mistakes_of_a_callback(callbacks: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        _train("--mock-data", callbacks=callbacks)


def test_every_hook_of_a_callback_is_checked() -> None:
    assert set(HOOKS) >= {"running", "on_start", "after_iteration", "on_evaluation", "on_save", "on_end"}


def _with_unused_weight(model: Any, number: int) -> nn.Module:
    layer = Layer(model.config.hidden_size)
    layer.unused = nn.Linear(2, 2)
    return layer


UNUSED = [f"layers.{number}.unused.{name}" for number in range(2) for name in ("bias", "weight")]


def test_a_parameter_without_a_gradient_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    model = _model("OwnModel", "build_layer", _with_unused_weight)
    _train("--mock-data", model_provider=model)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "no gradient" in line]
    assert line.startswith(f"warning: no gradient reached {', '.join(UNUSED[:3])} and 1 more in the first it")


def test_all_parameters_of_our_own_models_get_a_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    _train("--mock-data", model_provider=_model("OwnGPT", "losses", megalite.GPT.losses, megalite.GPT))
    assert "no gradient" not in capsys.readouterr().out


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return a program of a user's own with a model, which the ranks of a verification can import."""
    (tmp_path / "own_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("own_program")
    del sys.modules["own_program"]


PROGRAM = """
import megalite
from torch import nn

class OwnLayer(nn.Module):
    def __init__(self, h, context):
        super().__init__()
        self.up = megalite.ColumnParallelLinear(h, 4 * h, context)
        self.down = megalite.RowParallelLinear(4 * h, h, context)

    def forward(self, x, microbatch):
        return x + self.down(self.up(x).sigmoid())

class OwnModel(megalite.SequentialStage):
    def build_layer(self, number):
        return OwnLayer(self.config.hidden_size, self.context)
"""


def test_an_own_model_that_was_verified_trains_without_a_warning(
    program: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    config, _ = megalite.parse([*FLAGS, "--mock-data", "--params-dtype", "fp64"])
    providers = megalite.Providers(program.OwnModel)

    def warning(*flags: str) -> str:
        """Return what a run with these flags warns of."""
        caplog.clear()
        chosen, _ = megalite.parse([*FLAGS, "--mock-data", *flags])
        with Topology.fake(chosen.parallel.mesh, 4, 0) as topology:
            warn_if_unverified(resolve_run(chosen, topology, providers=providers))
        return caplog.text

    assert "OwnModel trains with --tp 2 and was not verified in this layout" in warning("--tp", "2")
    assert warning("--dp", "4") == ""
    assert megalite.verify_layouts(config, [megalite.Layout.parse("tp2")], 1, providers=providers)
    assert warning("--tp", "2") == ""
    assert "--verify-layouts tp2+sp" in warning("--tp", "2", "--sequence-parallel")
    text = warning("--tp", "2", "--cp", "2")
    assert (
        "OwnModel trains with --tp 2 --cp 2 and was not verified in this layout: a layer that mixes" in text
    )
    assert text.endswith("--verify-layouts cp2\n")  # tp2 was verified above
    assert megalite.verify_layouts(config, [megalite.Layout.parse("cp2")], 1, providers=providers)
    assert warning("--tp", "2", "--cp", "2") == warning("--cp", "4") == ""
    source = Path(program.__file__)
    source.write_text(source.read_text().replace("sigmoid", "tanh"))
    assert "was not verified in this layout" in warning("--tp", "2")


def test_a_model_that_is_not_the_same_run_is_not_recorded(program: ModuleType, tmp_path: Path) -> None:
    record_verified(program.OwnModel, [])
    record_verified(megalite.GPT, [megalite.ParallelConfig(tensor_model_parallel_size=2)])
    assert not (tmp_path / "own_program.verified.json").exists()
    record_verified(program.OwnModel, [megalite.ParallelConfig(tensor_model_parallel_size=2)])
    assert (tmp_path / "own_program.verified.json").exists()


def test_the_loop_of_the_examples_needs_no_save_folder(tmp_path: Path) -> None:
    done = run_program("examples/own_loop.py", *FLAGS, "--override-flags", "--eval-iters", "1", "--mock-data")
    assert done.returncode == 0, done.stderr
    assert "validation loss" in done.stdout


def test_a_mistake_in_a_loop_of_ones_own_is_one_line() -> None:
    done = run_program("examples/own_loop.py", *FLAGS, "--mock-data", "--lr", "fast")
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if "Traceback" in line] == []
    assert "error: --lr" in done.stderr


def test_a_save_without_a_folder_is_one_line(one_rank: megalite.Topology) -> None:
    config, _ = megalite.parse([*FLAGS, "--mock-data"])
    with (
        megalite.start_trainer(config, one_rank) as trainer,
        pytest.raises(UserError, match="there is no folder for it: pass --save FOLDER"),
    ):
        trainer.save()
