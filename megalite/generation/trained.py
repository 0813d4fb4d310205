"""A trained model out of a checkpoint, with nothing typed again: its config says what it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from megalite.agreement import code_record
from megalite.checkpoint.choice import choose_checkpoint
from megalite.checkpoint.full import check_weights
from megalite.checkpoint.manifest import CONFIG, DamagedCheckpoint, Manifest
from megalite.checkpoint.tensor_reader import read_tensors
from megalite.cli import parse
from megalite.config import Config, DataConfig, ModelConfig, TrainingConfig, check_config
from megalite.config.flags import flag_of
from megalite.data.tokenizer import NullTokenizer, Tokenizer, configured_tokenizer
from megalite.data.tokenizer_digest import tokenizer_digest
from megalite.errors import ConfigError, UserError
from megalite.generation.flags import ModelFlags
from megalite.log import configure_logging, log
from megalite.model.attention_core import Core
from megalite.model.backends import build_core
from megalite.model.stage import GPTStage
from megalite.optim.part import Part
from megalite.parallel.shard import Placement, new_parameter, spec_of
from megalite.topology import Launch, Topology


@dataclass(frozen=True)
class Trained:
    """A checkpoint, and the config of the run that saved it.

    Attributes:
        config: its model in the precision that is asked for, and padded as the layout here needs it.
    """

    manifest: Manifest
    config: Config

    @property
    def iteration(self) -> int:
        """What the run had come to."""
        return int(self.manifest.description["progress"]["iteration"])

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        assert self.config.model.vocab_size is not None
        return self.config.model.vocab_size


@contextmanager
def started(flags: ModelFlags, given: Mapping[str, object]) -> Iterator[Topology]:
    """The ranks of a tool, whose messages go to standard error: standard output is its result's.

    Args:
        given: all of the tool's flags by name, which every rank must have alike.

    Raises:
        UserError: there are not so many ranks as --tp takes, or they have different flags.
    """
    launch, tp = Launch.from_environment(), flags.parallel.tp
    configure_logging(launch.rank, stream=sys.stderr)
    if launch.world_size % tp:
        raise UserError(
            f"--tp {tp} does not divide the number of ranks, {launch.world_size}: start {tp} "
            f"(torchrun --nproc-per-node {tp}), or change it"
        )
    must_agree = code_record() | {flag_of(name): str(value) for name, value in given.items()}
    with Topology.start(flags.parallel, launch, must_agree=must_agree) as topology:
        yield topology


def open_trained(flags: ModelFlags, topology: Topology) -> Trained:
    """Finds the checkpoint and reads its config; every rank calls it.

    Raises:
        UserError: there is no whole checkpoint, or its model cannot be in this layout. On every rank.
    """
    manifest = choose_checkpoint(flags.load, topology, flags.iteration)
    if manifest is None:
        raise UserError(f"--load {flags.load} holds no checkpoint: give the folder that --save wrote")
    with topology.agreed():
        config = _config_of(manifest)
        # Rows that stand for no token are free, and so is how attention is computed.
        model = replace(config.model, pad_vocab_size_to=None, attention_backend="auto")
        if flags.dtype is not None:
            model = replace(model, params_dtype=flags.dtype)  # type: ignore[arg-type]  # one of its choices
        _check_layout(model, flags, topology)
    return Trained(manifest, replace(config, model=model))


def _config_of(manifest: Manifest) -> Config:
    try:
        config, _ = parse(["--config", str(manifest.folder / CONFIG)])
    except ConfigError as error:
        raise DamagedCheckpoint(manifest.folder, error.problems) from None
    if config.model.vocab_size is None:
        raise DamagedCheckpoint(manifest.folder, [f"{CONFIG} does not tell the vocabulary's size"])
    return config


def _check_layout(model: ModelConfig, flags: ModelFlags, topology: Topology) -> None:
    """Refuses a --tp that does not divide the model; what only training needs is not asked."""
    asked = Config(
        model=model,
        parallel=flags.parallel,
        data=DataConfig(mock_data=True),
        training=TrainingConfig(train_iters=1),
    )
    check_config(asked, topology.world_size)


def load_model(
    trained: Trained,
    topology: Topology,
    attention: Callable[[ModelConfig, Placement], Core] = build_core,
) -> GPTStage:
    """The whole model with its trained weights, cut over tp: no other memory is taken, and no optimizer's.

    Raises:
        UserError: the weights are of another model, or cannot be read. On every rank.
    """
    model = trained.config.model
    stage = GPTStage(model, topology, range(model.num_layers), seed=0, has_weights=False, attention=attention)
    _give_memory(stage, topology)
    parts = {
        f"model.{name}": Part(
            parameter.data.view(-1), 0, tuple(parameter.shape), spec_of(parameter), is_copied=True
        )
        for name, parameter in stage.named_parameters()
    }
    with topology.agreed():
        check_weights(trained.manifest, {name.removeprefix("model.") for name in parts}, model.num_layers)
        try:
            read_tensors(trained.manifest, parts, topology)
        except ValueError as error:
            raise DamagedCheckpoint(trained.manifest.folder, [str(error)]) from error
    return stage.eval()


@torch.no_grad()
def _give_memory(stage: GPTStage, topology: Topology) -> None:
    """Puts parameters of zeros in the places of those that have a shape alone."""
    for module in stage.modules():
        for name, parameter in module.named_parameters(recurse=False):
            place = Placement(topology.tp, parameter.dtype, topology.device)
            setattr(module, name, new_parameter(spec_of(parameter), place))
            module.get_parameter(name).zero_()


def tokenizer_of(trained: Trained, flags: ModelFlags, topology: Topology) -> Tokenizer:
    """The tokenizer that the run names, or the one given in its place; every rank calls it.

    Raises:
        UserError: there is none, it cannot be read, or it has tokens that the model does not know. On every
            rank.
    """
    with topology.agreed():
        data = flags.tokenizer or trained.config.data
        if data.resolved_tokenizer_type is None:
            raise UserError(
                f"the run that saved {trained.manifest.folder} names no tokenizer: "
                "give --tokenizer-type and its files"
            )
        # The null tokenizer adds its end-of-document token to the size that it is given.
        is_null = data.resolved_tokenizer_type == "NullTokenizer"
        tokenizer = configured_tokenizer(data, trained.vocab_size - is_null)
        if tokenizer.vocab_size > trained.vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, and the model {trained.vocab_size}: "
                "give the one that it was trained with"
            )
        saved = trained.manifest.description.get("tokenizer")
        differs = saved is not None and not isinstance(tokenizer, NullTokenizer)
        if differs and topology.rank == 0 and saved != tokenizer_digest(tokenizer):
            log.warning("the tokenizer is not the one that the model was trained with: ids mean other text")
    return tokenizer


def end_of_document(tokenizer: Tokenizer) -> int | None:
    """The token that ends a document; None, with a warning, where the vocabulary has none."""
    try:
        return tokenizer.eod
    except UserError as error:
        log.warning("no text ends by itself: %s", error)
        return None
