"""BERT's samples: token for token those of megatron-core's dataset, and what a sample promises."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megalite.cli.where import sample_spans
from megalite.data import _index_builder
from megalite.data.bert_dataset import BertDataset, BertOptions, BertSamples, word_pieces
from megalite.data.build_datasets import BuildOptions, build_from_corpora, open_corpora
from megalite.data.corpus_sources import sources_of_one_blend
from megalite.data.index_cache import IndexCache
from megalite.data.indexed_dataset import IndexedDataset, IndexedWriter
from megalite.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer, TokenizerFiles, build_tokenizer
from megalite.utils.errors import UserError

ROOT = Path(__file__).parents[3]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
NUM_DOCUMENTS = 60
SEED, LENGTH = 1234, 64

pytest.importorskip("tokenizers")
pytest.importorskip("sentencex")


@pytest.fixture(scope="module")
def vocab_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A WordPiece vocabulary learned from the repository's corpus, as BERT's vocab.txt."""
    import tokenizers

    model = tokenizers.BertWordPieceTokenizer()
    model.train_from_iterator(texts(), vocab_size=500, special_tokens=SPECIAL, show_progress=False)
    folder = tmp_path_factory.mktemp("words")
    model.save_model(str(folder))
    return str(folder / "vocab.txt")


def texts() -> list[str]:
    with gzip.open(ROOT / "scripts/corpus/bible.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in islice(lines, NUM_DOCUMENTS)]


@pytest.fixture(scope="module")
def tokenizer(vocab_file: str) -> Tokenizer:
    return build_tokenizer("BertWordPieceLowerCase", TokenizerFiles(vocab_file=vocab_file))


@pytest.fixture(scope="module")
def corpus(vocab_file: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of the corpus as the tool makes it, with a sequence for each sentence."""
    folder = tmp_path_factory.mktemp("sentences")
    (folder / "part.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    command = [
        *(sys.executable, "tools/preprocess_data.py", "--input", str(folder / "part.jsonl")),
        *("--output-prefix", str(folder / "bible"), "--split-sentences", "--workers", "1"),
        *("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", vocab_file),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return str(folder / "bible_text_sentence")


def options_of(tokenizer: Tokenizer, **changes: Any) -> BertOptions:
    values = {"mask_prob": 0.15, "short_seq_prob": 0.1, "has_two_segments": True, **changes}
    return BertOptions(LENGTH, SEED, word_pieces(tokenizer), **values)


def dataset_of(corpus: str, options: BertOptions, num_samples: int | None = 200) -> BertDataset:
    indexed = IndexedDataset(corpus)
    return BertDataset(indexed, range(len(indexed)), num_samples, options)


@pytest.mark.parametrize("has_two_segments", [True, False])
def test_samples_are_megatrons(
    has_two_segments: bool, corpus: str, tokenizer: Any, vocab_file: str, tmp_path: Path, one_rank: Any
) -> None:
    pytest.importorskip("megatron.core.datasets.helpers_cpp", reason="megatron-core is not installed")
    from megatron.core.datasets.bert_dataset import (
        BERTMaskedWordPieceDataset,
        BERTMaskedWordPieceDatasetConfig,
    )
    from megatron.core.datasets.indexed_dataset import IndexedDataset as TheirIndexed
    from megatron.core.datasets.utils import Split

    names = Path(vocab_file).read_text().splitlines()
    theirs_tokenizer = SimpleNamespace(
        **{name.strip("[]").lower(): names.index(name) for name in SPECIAL},
        inv_vocab=dict(enumerate(names)),
        unique_identifiers={},
        eod=None,
    )
    config = BERTMaskedWordPieceDatasetConfig(
        random_seed=SEED,
        sequence_length=LENGTH,
        path_to_cache=str(tmp_path),
        blend=None,
        split="1",
        tokenizer=theirs_tokenizer,
        masking_probability=0.15,
        short_sequence_probability=0.1,
        masking_max_ngram=3,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=has_two_segments,
    )
    indexed = TheirIndexed(corpus)
    documents = np.arange(NUM_DOCUMENTS, dtype=np.int32)
    theirs = BERTMaskedWordPieceDataset(indexed, corpus, documents, 600, Split.train, config)
    ours = dataset_of(corpus, options_of(tokenizer, has_two_segments=has_two_segments), 600)
    np.testing.assert_array_equal(ours.sample_index, theirs.sample_index)
    assert len(ours) > 600

    samples = BertSamples(ours.options)
    rows = torch.stack([torch.from_numpy(ours[i]) for i in range(len(ours))])
    batch = samples.microbatch(rows, torch.arange(len(ours)))
    assert batch.loss_mask is not None and batch.token_types is not None
    assert batch.order_labels is not None and batch.document_ids is not None
    assert batch.label_positions is not None
    for i in range(len(ours)):
        expected = theirs[i]
        assert torch.equal(batch.tokens[i], torch.from_numpy(expected["text"]))
        assert torch.equal(batch.token_types[i], torch.from_numpy(expected["types"]))
        (positions,) = np.nonzero(expected["loss_mask"])
        assert batch.label_positions[i][batch.loss_mask[i]].tolist() == positions.tolist()
        assert batch.labels[i][batch.loss_mask[i]].tolist() == expected["labels"][positions].tolist()
        assert int(batch.order_labels[i]) == expected["is_random"]
        # Theirs also takes a padding token that replaces a masked one at random for padding.
        is_padding = batch.document_ids[i].bool()
        assert not (torch.from_numpy(expected["padding_mask"]).bool() & is_padding).any()
        assert (batch.tokens[i][is_padding] == 0).all()


def test_words_are_masked_as_wholes_in_the_right_share(corpus: str, tokenizer: Any) -> None:
    """15% of the tokens are predicted; of these 80% are masked, 10% random and 10% unchanged."""
    pieces = word_pieces(tokenizer)
    dataset = dataset_of(corpus, options_of(tokenizer), 2000)
    rows = np.stack([dataset[i] for i in range(2000)])
    tokens, labels = rows[:, :LENGTH], rows[:, 2 * LENGTH : 3 * LENGTH]
    is_predicted = labels >= 0
    is_text = np.arange(LENGTH) < rows[:, -2:-1]
    assert 0.13 < is_predicted.sum() / is_text.sum() < 0.155
    is_mask, is_same = tokens == pieces.mask, tokens == labels
    assert 0.79 < is_mask[is_predicted].mean() < 0.81
    assert 0.09 < is_same[is_predicted].mean() < 0.11
    original = np.where(is_predicted, labels, tokens)
    continues = pieces.continues[original]
    follows_special = np.isin(original[:, :-1], (pieces.cls, pieces.sep))  # the cut segment's first token
    inside = continues[:, 1:] & is_text[:, 1:] & ~follows_special
    assert (is_predicted[:, 1:] == is_predicted[:, :-1])[inside].all()
    assert 0.45 < rows[:, -1].mean() < 0.55


def test_a_sample_depends_on_its_number_alone(corpus: str, tokenizer: Any) -> None:
    one, other = (dataset_of(corpus, options_of(tokenizer)) for _ in range(2))
    backwards = [other[i] for i in reversed(range(50))]
    assert all(np.array_equal(one[i], backwards[49 - i]) for i in range(50))
    assert not np.array_equal(one[0], one[1])


def test_a_sample_is_traced_to_its_sentences(corpus: str, tokenizer: Any) -> None:
    dataset = dataset_of(corpus, options_of(tokenizer))
    for i in range(20):
        spans = sample_spans(dataset, i)
        assert len({span.document for span in spans}) == 1 < len(spans)
        sentences = {int(token) for span in spans for token in span.tokens}
        row = dataset[i]
        labels = row[2 * LENGTH : 3 * LENGTH]
        assert set(labels[labels >= 0].tolist()) <= sentences
    with pytest.raises(IndexError):
        sample_spans(dataset, len(dataset))


def test_splits_are_whole_documents(corpus: str, tokenizer: Any, tmp_path: Path) -> None:
    samples = BertSamples(options_of(tokenizer))
    sources = sources_of_one_blend([corpus], "80,20,0")
    options = BuildOptions(samples, cache=IndexCache(tmp_path))
    for _ in range(2):  # built, then mapped
        splits = build_from_corpora(sources, open_corpora(sources), (50, 20, 0), options)
        assert isinstance(splits.train, BertDataset) and isinstance(splits.valid, BertDataset)
        bounds = splits.train.indexed.document_index
        assert splits.train.sample_index[:, 1].max() <= bounds[round(0.8 * NUM_DOCUMENTS)]
        assert splits.valid.sample_index[:, 0].min() >= bounds[round(0.8 * NUM_DOCUMENTS)]


def test_short_documents_are_refused(write_dataset: Any, tokenizer: Any) -> None:
    one_sentence = IndexedDataset(write_dataset([5, 9, 2]))
    samples = BertSamples(options_of(tokenizer))
    with pytest.raises(UserError, match=r"have one sequence each.*--split-sentences"):
        samples.check(one_sentence)
    with pytest.raises(UserError, match="no document of 2 or more sentences of 1 to 512"):
        samples.dataset(one_sentence, range(3), 4, "train", None)
    BertSamples(options_of(tokenizer, has_two_segments=False)).check(one_sentence)


def test_empty_sentences_count_as_none(tmp_path: Path, tokenizer: Any) -> None:
    def dataset(name: str, *documents: list[int]) -> BertDataset:
        """Return the dataset of documents of sentences, each of so many tokens."""
        with IndexedWriter(str(tmp_path / name), np.uint16) as writer:
            for number, lengths in enumerate(documents):
                writer.add_document([np.full(length, 50 + number, np.uint16) for length in lengths])
        return dataset_of(str(tmp_path / name), options_of(tokenizer), 20)

    with pytest.raises(UserError, match="no document of 2 or more sentences of 1 to 512 tokens"):
        dataset("empty", [0, 0, 0], [0, 9, 0])
    full = dataset("full", [40, 30, 20, 10], [8, 9])
    some = dataset("some", [0, 40, 0, 0, 30, 20, 10, 0, 0], [0, 0, 0], [7, 0], [8, 0, 9])
    for i in range(20):
        # The documents between them have other numbers, and so other tokens.
        row = np.where(some[i] == 53, 51, some[i])
        np.testing.assert_array_equal(row, full[i])
        assert all(len(span.tokens) for span in sample_spans(some, i))


def test_other_tokenizers_are_refused() -> None:
    with pytest.raises(UserError, match=r"no token \[CLS\], \[SEP\], \[MASK\], \[PAD\].*vocab.txt"):
        word_pieces(ByteTokenizer())


def test_bad_indices_are_refused() -> None:
    def build(bounds: list[int], **changes: Any) -> np.ndarray:
        arguments = {
            "document_bounds": np.array(bounds, np.int64),
            "sequence_lengths": np.full(4, 9, np.int32),
            "num_samples": 3,
            "max_tokens": 20,
            "short_prob": 0.1,
            "min_sentences": 2,
            "seed": 1,
        }
        return _index_builder.build_sentence_samples(**{**arguments, **changes})

    assert len(build([0, 2, 4])) == 4
    assert len(build([0, 1, 2])) == 0  # and it ends
    assert len(build([])) == 0
    for bounds in ([0, 5], [3, 1], [-1, 2]):
        with pytest.raises(IndexError, match="outside the array of lengths"):
            build(bounds)
    with pytest.raises(ValueError, match="max_tokens"):
        build([0, 2], max_tokens=1)
    with pytest.raises(ValueError, match="short_prob"):
        build([0, 2], short_prob=1.5)
