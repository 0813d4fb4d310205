"""The public names of the library; `__init__.py` imports each when it is first used."""

from megalite.checkpoint.lease import hold_folder as hold_folder
from megalite.checkpoint.load import load_checkpoint as load_checkpoint
from megalite.cli.train import pretrain as pretrain
from megalite.config import CheckpointConfig as CheckpointConfig
from megalite.config import Config as Config
from megalite.config import DataConfig as DataConfig
from megalite.config import LoggingConfig as LoggingConfig
from megalite.config import ModelConfig as ModelConfig
from megalite.config import OptimizerConfig as OptimizerConfig
from megalite.config import ParallelConfig as ParallelConfig
from megalite.config import RecomputeConfig as RecomputeConfig
from megalite.config import TrainingConfig as TrainingConfig
from megalite.config import check_config as check_config
from megalite.data.blend import Epochs as Epochs
from megalite.data.build_datasets import DatasetSplits as DatasetSplits
from megalite.data.gpt_dataset import GPTDataset as GPTDataset
from megalite.data.indexed_dataset import IndexedDataset as IndexedDataset
from megalite.data.microbatch import LossTerm as LossTerm
from megalite.data.microbatch import Microbatch as Microbatch
from megalite.data.microbatch import WithTerms as WithTerms
from megalite.data.samples import FieldSamples as FieldSamples
from megalite.distributed.collectives import copy_to_tensor_parallel as copy_to_tensor_parallel
from megalite.distributed.collectives import gather_from_sequence_parallel as gather_from_sequence_parallel
from megalite.distributed.collectives import gather_from_tensor_parallel as gather_from_tensor_parallel
from megalite.distributed.collectives import reduce_from_tensor_parallel as reduce_from_tensor_parallel
from megalite.distributed.collectives import (
    reduce_scatter_to_sequence_parallel as reduce_scatter_to_sequence_parallel,
)
from megalite.distributed.collectives import scatter_to_sequence_parallel as scatter_to_sequence_parallel
from megalite.distributed.collectives import scatter_to_tensor_parallel as scatter_to_tensor_parallel
from megalite.distributed.rendezvous import Launch as Launch
from megalite.distributed.topology import Topology as Topology
from megalite.frontends.command_line import parse as parse
from megalite.model.bert_stage import BERT as BERT
from megalite.model.embedding import word_table as word_table
from megalite.model.norm import build_norm as build_norm
from megalite.model.stage import SequentialStage as SequentialStage
from megalite.model.stage import Stage as Stage
from megalite.model.transformer_stage import GPT as GPT
from megalite.observe.verify.layouts import Layout as Layout
from megalite.observe.verify.verification import verify_layouts as verify_layouts
from megalite.tensor_parallel.counter_random import Dropout as Dropout
from megalite.tensor_parallel.linear import ColumnParallelLinear as ColumnParallelLinear
from megalite.tensor_parallel.linear import RowParallelLinear as RowParallelLinear
from megalite.tensor_parallel.parameter_spec import LayerContext as LayerContext
from megalite.tensor_parallel.parameter_spec import ParameterSpec as ParameterSpec
from megalite.tensor_parallel.parameter_spec import new_buffer as new_buffer
from megalite.tensor_parallel.parameter_spec import new_parameter as new_parameter
from megalite.tensor_parallel.placement import Cut as Cut
from megalite.tensor_parallel.vocab_parallel import (
    vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
)
from megalite.train.loop import Callback as Callback
from megalite.train.loop import TrainingLoop as TrainingLoop
from megalite.train.run_context import Providers as Providers
from megalite.train.run_context import RunContext as RunContext
from megalite.train.run_context import num_samples_of as num_samples_of
from megalite.train.stopping import Stop as Stop
from megalite.train.train_step import StepResult as StepResult
from megalite.train.trainer import Trainer as Trainer
from megalite.train.trainer import start_trainer as start_trainer
from megalite.utils.commands import run_rank as run_rank
from megalite.utils.errors import UserError as UserError
from megalite.utils.wrapping import wrap_point as wrap_point

__version__: str
