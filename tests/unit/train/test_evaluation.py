"""Where in the data an evaluation begins."""

from megalite.config import Config, TrainingConfig
from megalite.train.evaluation import Evaluator
from megalite.train.step import BatchTokens


def test_an_evaluation_goes_on_where_the_last_one_ended(one_rank):
    training = TrainingConfig(eval_interval=10, eval_iters=3, micro_batch_size=4, global_batch_size=8)
    evaluator = Evaluator([], None, Config(training=training), one_rank, BatchTokens(0), None)
    assert [evaluator.first_sample("valid", iteration) for iteration in (10, 20, 25, 30)] == [0, 24, 48, 48]
    assert evaluator.first_sample("test", 30) == 0
