"""Test at which sample an evaluation begins."""

from megalite.config import Config, TrainingConfig
from megalite.data.samples import GPTSamples
from megalite.train.evaluator import Evaluator
from megalite.train.run_context import RunContext
from megalite.train.telemetry.timers import Timers


def test_an_evaluation_starts_where_the_last_one_ended(one_rank):
    training = TrainingConfig(eval_interval=10, eval_iters=3, micro_batch_size=4, global_batch_size=8)
    evaluator = Evaluator(
        RunContext(Config(training=training), one_rank, Timers(), GPTSamples(8, seed=1)), [], None
    )
    assert [evaluator.first_sample("valid", iteration) for iteration in (10, 20, 25, 30)] == [0, 24, 48, 48]
    assert evaluator.first_sample("test", 30) == 0
