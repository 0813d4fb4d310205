import numpy as np

from megalite.data.build_datasets import build_mock_datasets
from megalite.data.samples import GPTSamples


def test_samples_are_functions_of_seed_split_and_number():
    splits = build_mock_datasets(GPTSamples(64, seed=1, vocab_size=100), (8, 4, 0))
    again = build_mock_datasets(GPTSamples(64, seed=1, vocab_size=100), (8, 4, 0))
    assert splits.train is not None and again.train is not None and splits.valid is not None
    assert (len(splits.train), len(splits.valid), splits.test) == (8, 4, None)
    assert splits.train[5].shape == (65,)
    assert splits.train[5].dtype == np.int64
    assert 0 <= splits.train[5].min() <= splits.train[5].max() < 100
    assert np.array_equal(splits.train[5], again.train[5])
    assert not np.array_equal(splits.train[5], splits.train[4])
    assert not np.array_equal(splits.train[3], splits.valid[3])
    other = build_mock_datasets(GPTSamples(64, seed=2, vocab_size=100), (8, 4, 0))
    assert other.train is not None
    assert not np.array_equal(splits.train[5], other.train[5])
