"""Load a trained model for generation or evaluation: flags, checkpoint, weights and tokenizer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from megalite.attention.choice import build_core
from megalite.attention.core import StageCore
from megalite.checkpoint.convert.model_settings import parameters_of, without_training_buffers
from megalite.checkpoint.full_tensors import check_averages, check_weights
from megalite.checkpoint.load import choose_checkpoint, damage_named
from megalite.checkpoint.manifest import CONFIG, DamagedCheckpoint, Manifest, TensorBytes, saved_config
from megalite.checkpoint.stored_run import StoredRun, run_at
from megalite.checkpoint.tensor_files import read_tensors
from megalite.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainingConfig, check_config
from megalite.config.config import even_partition, layers_of_stages
from megalite.config.option import flag_of
from megalite.data.tokenizers.tokenizer import (
    TOKENIZER_TYPES,
    NullTokenizer,
    Tokenizer,
    configured_tokenizer,
    end_of_document,
    tokenizer_digest,
)
from megalite.distributed.agreement import code_record
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.frontends.tool_parser import ToolParser, positive_int
from megalite.model.bert_stage import STAGES
from megalite.model.stage import DTYPES
from megalite.model.transformer_stage import TransformerStage
from megalite.tensor_parallel.parameter_spec import (
    LayerContext,
    ParameterShard,
    buffer_spec,
    new_parameter,
    spec_of,
)
from megalite.utils.errors import UserError
from megalite.utils.log import configure_logging, log

CP_COMM_TYPE: Final = "p2p"
"""How the tools' queries reach the keys of other context-parallel ranks, whatever the run has used."""
_TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "tokenizer_name_or_path")


@dataclass(frozen=True)
class ModelFlags:
    """Flags of the tools that load a model.

    Attributes:
        iteration: iteration of the checkpoint; None for the latest.
        dtype: dtype of the weights after loading; None for the dtype of the run.
        tokenizer: tokenizer files to use instead of the files that the run names.
        ema: load the average of the weights that a run with --ema-decay has saved.
    """

    load: Path | StoredRun
    iteration: int | None
    dtype: str | None
    parallel: ParallelConfig
    tokenizer: DataConfig | None
    ema: bool = False

    @staticmethod
    def add_to(parser: ToolParser) -> None:
        """Add the flags to a parser."""
        model = parser.add_argument_group("the model")
        model.add_argument(
            "--load",
            required=True,
            type=run_at,
            help="folder of the checkpoints of a run (its --save)",
        )
        model.add_argument(
            "--load-iteration", type=positive_int, help="iteration of the checkpoint (default: the latest)"
        )
        model.add_argument(
            "--ema",
            action="store_true",
            help="load the average of the weights instead of the weights, of a run with --ema-decay",
        )
        model.add_argument(
            "--dtype", choices=sorted(DTYPES), help="data type of the weights (default: as in the run)"
        )
        model.add_argument(
            "--tp", type=positive_int, default=1, help="tensor-parallel size, under torchrun (default 1)"
        )
        model.add_argument(
            "--pp",
            type=positive_int,
            default=1,
            help="pipeline stages, under torchrun, for a model too large for the memory of --tp ranks; "
            "they run one after the other (default 1)",
        )
        model.add_argument(
            "--cp",
            type=positive_int,
            default=1,
            help="context-parallel size, under torchrun, for long sequences: each rank reads a part of the "
            "tokens, and keeps their keys and values (default 1)",
        )
        model.add_argument(
            "--distributed-backend",
            choices=("auto", "gloo", "nccl"),
            default="auto",
            help="gloo runs on the CPU (default: auto, which uses the GPU if there is one)",
        )
        files = parser.add_argument_group("tokenizer, if it is not at the path that the run names")
        types = f"one of {', '.join(TOKENIZER_TYPES)}"
        files.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, metavar="TYPE", help=types)
        for name in _TOKENIZER[1:]:
            files.add_argument("--" + name.replace("_", "-"))

    @staticmethod
    def of(flags: argparse.Namespace) -> ModelFlags:
        """Read the flags from a parsed command line."""
        tokenizer = {name: getattr(flags, name) for name in _TOKENIZER}
        return ModelFlags(
            flags.load,
            flags.load_iteration,
            flags.dtype,
            ParallelConfig(
                tensor_model_parallel_size=flags.tp,
                pipeline_model_parallel_size=flags.pp,
                context_parallel_size=flags.cp,
                cp_comm_type=CP_COMM_TYPE,
                distributed_backend=flags.distributed_backend,
            ),
            DataConfig(**tokenizer) if any(tokenizer.values()) else None,
            flags.ema,
        )


@dataclass(frozen=True)
class TrainedModel:
    """Checkpoint, and the config of the run that saved it.

    Attributes:
        config: config of the run, with the requested precision and padding for the layout of this process.
        prefix: prefix of the names of the weights to load: ``model.``, or ``ema.`` for their average.
    """

    manifest: Manifest
    config: Config
    prefix: str = "model."

    @property
    def iteration(self) -> int:
        return int(self.manifest.description["progress"]["iteration"])

    @property
    def vocab_size(self) -> int:
        assert self.config.model.vocab_size is not None
        return self.config.model.vocab_size

    def check_is_gpt(self, what: str) -> None:
        """Raise an error if the model does not predict the next token.

        Args:
            what: subject and verb of the error message, such as "--text evaluates".

        Raises:
            UserError: the model is a bert.
        """
        if self.config.model.architecture != "gpt":
            raise UserError(
                f"{what} a model that predicts the next token, and {self.manifest.title} holds a "
                f"{self.config.model.architecture}: evaluate it with tools/evaluate.py --split"
            )


@contextmanager
def start_ranks(flags: ModelFlags, all_flags: Mapping[str, object]) -> Iterator[Topology]:
    """Start the ranks of a tool. Its log goes to standard error, because standard output is for its result.

    Args:
        all_flags: all flags of the tool by name; they must be equal on every rank.

    Raises:
        UserError: --tp x --pp x --cp does not divide the number of ranks, or ranks have different flags.
    """
    launch, parallel = Launch.from_environment(), flags.parallel
    configure_logging(launch.rank, stream=sys.stderr)
    if launch.world_size % (smallest := parallel.mesh.smallest_world):
        axes = {"--tp": parallel.tp, "--pp": parallel.pp, "--cp": parallel.cp}
        sizes = " x ".join(f"{flag} {size}" for flag, size in axes.items() if size > 1)
        raise UserError(
            f"{sizes} does not divide the number of ranks, {launch.world_size}: start {smallest} "
            f"(torchrun --nproc-per-node {smallest}), or change it"
        )
    must_agree = code_record() | {flag_of(name): str(value) for name, value in all_flags.items()}
    with Topology.start(flags.parallel.mesh, launch, must_agree=must_agree) as topology:
        yield topology


def open_trained(flags: ModelFlags, topology: Topology) -> TrainedModel:
    """Find the checkpoint and read its config. Every rank must call it.

    Raises:
        UserError: no checkpoint is complete, or its model does not fit the layout. Every rank raises it.
    """
    prefix = "ema." if flags.ema else "model."

    def needs(manifest: Manifest) -> dict[str, list[TensorBytes]]:
        """Return all weights: the layout does not say yet which of them this rank reads."""
        wanted: dict[str, list[TensorBytes]] = {}
        for name, pieces in manifest.tensors.items():
            for piece in pieces if name.startswith(prefix) else ():
                wanted.setdefault(piece.file, []).append(TensorBytes(name, 0, sys.maxsize))
        return wanted

    manifest = choose_checkpoint(flags.load, topology, flags.iteration, needs)
    if manifest is None:
        raise UserError(f"--load {flags.load} has no checkpoint: pass the --save folder of a run")
    with topology.agreed():
        config = saved_config(manifest)
        if config.model.vocab_size is None:
            raise DamagedCheckpoint(manifest.title, [f"{CONFIG} has no vocabulary size"])
        if flags.ema:
            check_averages(manifest)
        # Vocabulary padding and attention backend can differ from the run, and only training clips scores.
        model = replace(config.model, pad_vocab_size_to=None, attention_backend="auto", qk_clip=False)
        if flags.dtype is not None:
            model = replace(model, params_dtype=flags.dtype)  # type: ignore[arg-type]  # one of its choices
        _check_layout(model, flags, topology.world_size)
    return TrainedModel(manifest, replace(config, model=model), prefix)


def _check_layout(model: ModelConfig, flags: ModelFlags, world_size: int) -> None:
    """Check that --tp, --pp and --cp divide the model, without checking options that only training needs."""
    if flags.parallel.pp > model.num_layers:
        raise UserError(f"--pp {flags.parallel.pp} is more than the model's {model.num_layers} layers")
    step = 2 * flags.parallel.cp  # that divides samples of training, and not prompts
    config = Config(
        model=replace(model, seq_length=max(step, model.seq_length // step * step)),
        parallel=replace(flags.parallel, pipeline_model_parallel_size=1),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(train_iters=1),
    )
    check_config(config, world_size // flags.parallel.pp)


def load_model(
    trained: TrainedModel,
    topology: Topology,
    attention: Callable[[ModelConfig, LayerContext], StageCore] = build_core,
    *,
    has_documents: bool = False,
    has_router_losses: bool = False,
) -> TransformerStage:
    """Build this rank's stage, sharded over tp, and load its weights without additional memory.

    Args:
        has_documents: attention must hide the keys of other documents.
        has_router_losses: routers compute their terms of the loss.

    Raises:
        UserError: the weights belong to another model, or cannot be read. Every rank raises it.
    """
    model = without_training_buffers(trained.config.model)
    if not has_router_losses:
        model = replace(model, moe_router_load_balancing_type="none", moe_z_loss_coeff=0.0)
    context = LayerContext(
        topology,
        DTYPES[model.params_dtype],
        has_weights=False,
        has_documents=has_documents or not model.is_causal,
        cp_comm_type=CP_COMM_TYPE,
    )
    pp = topology.pp
    layers = layers_of_stages(model.num_layers, even_partition(model.num_layers, pp.size))[pp.rank]
    stage = STAGES[model.architecture](
        model, context, layers, is_first=pp.is_first, is_last=pp.is_last, attention=attention
    )
    _allocate(stage, topology)
    parts = {
        f"{trained.prefix}{name}": ParameterShard.whole(parameter.data, spec_of(parameter))
        for name, parameter in stage.named_parameters()
    }
    parts |= {
        f"model.{name}": ParameterShard.whole(buffer, buffer_spec(buffer), is_buffer=True)
        for name, buffer in stage.named_buffers()
    }
    with topology.agreed(), trained.manifest.download or nullcontext():
        check_weights(trained.manifest, parameters_of(model), model.num_layers)
        with damage_named(trained.manifest):
            read_tensors(trained.manifest, parts, topology)
    return stage.eval()


@torch.no_grad()
def _allocate(stage: TransformerStage, topology: Topology) -> None:
    for module in stage.modules():
        for name, parameter in module.named_parameters(recurse=False):
            context = LayerContext(topology, parameter.dtype)
            setattr(module, name, new_parameter(spec_of(parameter), context))
            module.get_parameter(name).zero_()


def tokenizer_of(trained: TrainedModel, flags: ModelFlags, topology: Topology) -> Tokenizer:
    """Build the tokenizer that the flags name, or otherwise the run. Every rank must call it.

    Raises:
        UserError: there is no tokenizer, it cannot be read, or it has more tokens than the model. Every rank
            raises it.
    """
    with topology.agreed():
        data = flags.tokenizer or trained.config.data
        if data.resolved_tokenizer_type is None:
            raise UserError(
                f"the run that saved {trained.manifest.title} names no tokenizer: "
                "pass --tokenizer-type and its files"
            )
        # A NullTokenizer adds an end-of-document token to the size that is passed.
        is_null = data.resolved_tokenizer_type == "NullTokenizer"
        tokenizer = configured_tokenizer(data, trained.vocab_size - is_null)
        if tokenizer.vocab_size > trained.vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, but the model has {trained.vocab_size}: "
                "pass the tokenizer that the model was trained with"
            )
        saved = trained.manifest.description.get("tokenizer")
        differs = saved is not None and not isinstance(tokenizer, NullTokenizer)
        if differs and topology.rank == 0 and saved != tokenizer_digest(tokenizer):
            log.warning("the model was trained with another tokenizer, whose ids mean different text")
    return tokenizer


def stop_token(tokenizer: Tokenizer) -> int | None:
    """Return the token that ends a text; None, with a warning, if the vocabulary has none."""
    token = end_of_document(tokenizer)
    if token is None:
        log.warning("no text will end before its maximum length: the vocabulary has no end-of-document token")
    return token
