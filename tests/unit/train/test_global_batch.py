"""Test at which sample an evaluation begins, and how many batches it has."""

import pytest

from megalite.config import Config, TrainingConfig
from megalite.data.packed_dataset import PackedSamples, PackingOptions
from megalite.data.samples import GPTSamples
from megalite.train.global_batch import Evaluator
from megalite.train.run_context import RunContext, num_samples_of
from megalite.train.telemetry.timers import Timers


def test_an_evaluation_starts_where_the_last_one_ended(one_rank):
    training = TrainingConfig(eval_interval=10, eval_iters=3, micro_batch_size=4, global_batch_size=8)
    evaluator = Evaluator(
        RunContext(Config(training=training), one_rank, Timers(), GPTSamples(8, seed=1)), [], None
    )
    assert [evaluator.first_sample("valid", iteration) for iteration in (10, 20, 25, 30)] == [0, 24, 48, 48]
    assert evaluator.first_sample("test", 30) == 0


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({"train_iters": 5}, 1),
        ({"train_iters": 10}, 1),
        ({"train_iters": 300}, 30),
        ({"train_iters": 1000}, 100),
        ({"train_iters": 10**6}, 100),
        ({"train_samples": 4000, "global_batch_size": 8}, 50),
        ({"train_iters": 10, "eval_iters": 100}, 100),
        ({"train_iters": 10, "eval_iters": 0}, 0),
    ],
)
def test_an_evaluation_of_a_short_run_is_short(training, expected, one_rank):
    config = Config(training=TrainingConfig(**training))
    evaluator = Evaluator(RunContext(config, one_rank, Timers(), GPTSamples(8, seed=1)), [], None)
    batch_size = config.global_batch(1)
    assert evaluator.num_batches == expected
    assert num_samples_of(config, 1)[2] == expected * batch_size


def test_eval_iters_determines_the_samples_of_a_run():
    """Test Megatron-LM's counts."""
    training = TrainingConfig(train_iters=20, eval_interval=6, eval_iters=3, global_batch_size=8)
    assert num_samples_of(Config(training=training), 1) == (160, (20 // 6 + 1) * 3 * 8, 3 * 8)


def test_an_evaluation_of_conversations_starts_at_the_first_one(one_rank):
    """Each evaluation reads the same ones, at most once."""
    training = TrainingConfig(eval_interval=10, eval_iters=3, micro_batch_size=4, global_batch_size=8)
    samples = PackedSamples(PackingOptions(8, seed=1, vocab_size=9))
    evaluator = Evaluator(RunContext(Config(training=training), one_rank, Timers(), samples), [], None)
    assert [evaluator.first_sample("valid", iteration) for iteration in (10, 20, 30)] == [0, 0, 0]
