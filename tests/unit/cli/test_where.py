"""Test that the traced samples have the tokens of the run's own dataset, for any dp."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megalite.cli.where import main, trace_iteration
from megalite.data.batch_loader import microbatch_samples
from megalite.data.build_datasets import BuildOptions, num_samples_per_split
from megalite.data.corpus_sources import sources_of_one_blend
from megalite.data.indexed_dataset import IndexedDataset, IndexedWriter
from megalite.data.prepare.report import SOURCE, write_sources
from megalite.data.samples import GPTSamples
from megalite.frontends.command_line import parse
from megalite.utils.errors import UserError
from tests.corpora import build_from_sources

SEQ_LENGTH, BATCH, ITERATIONS = 8, 4, 6
FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --lr 1e-3 --eval-iters 1 --eval-interval 4 "
    f"--seq-length {SEQ_LENGTH} --micro-batch-size 1 --train-iters {ITERATIONS} --split 90,10,0"
).split()


@pytest.fixture
def corpora(tmp_path: Path) -> list[str]:
    """Write two corpora of documents of 0 to 7 tokens, some of several sequences; all tokens differ."""
    rng = np.random.default_rng(0)
    prefixes, first = [], 0
    for name in ("one", "two"):
        prefixes.append(str(tmp_path / name))
        with IndexedWriter(prefixes[-1], "uint16") as writer:
            for _ in range(25):
                lengths = rng.integers(0, 8, rng.integers(1, 3))
                writer.add_document(
                    [np.arange(first + i * 10, first + i * 10 + n) for i, n in enumerate(lengths)]
                )
                first += 20
    return prefixes


def flags_of(data_path: Sequence[str], *more: str) -> list[str]:
    return [
        *FLAGS,
        "--data-path",
        *data_path,
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "2000",
        *more,
    ]


@pytest.mark.parametrize(
    ("blend", "order", "dp"),
    [(blend, "megatron", dp) for blend in (False, True) for dp in (1, 2, 4)] + [(True, "windows", 2)],
)
def test_origins_join_to_the_samples_of_the_run(corpora: list[str], blend: bool, order: str, dp: int) -> None:
    data_path = ["0.3", corpora[0], "0.7", corpora[1]] if blend else corpora[:1]
    num_samples = num_samples_per_split(0, ITERATIONS, 4, 1, BATCH)
    is_cut = order == "windows"
    options = BuildOptions(GPTSamples(SEQ_LENGTH, 1234, are_windows=is_cut, shuffle_block=3 if is_cut else 1))
    train = build_from_sources(sources_of_one_blend(data_path, "90,10,0"), num_samples, options).train
    assert train is not None
    flags = flags_of(data_path, "--global-batch-size", str(BATCH), "--dp", str(dp), "--sample-order", order)
    flags += ["--shuffle-block", "3"] if is_cut else []
    config, _ = parse(flags)
    for iteration in (1, 5):
        traced = list(trace_iteration(config, iteration))
        taken = {
            (rank, microbatch): microbatch_samples((iteration - 1) * BATCH, microbatch, 1, rank, dp).tolist()
            for rank in range(dp)
            for microbatch in range(BATCH // dp)
        }
        assert {(s.dp_rank, s.microbatch): [s.number] for s in traced} == taken
        for sample in traced:
            joined = np.concatenate([span.tokens for span in sample.spans])
            assert joined.tolist() == train[sample.number].tolist()
            for span in sample.spans:
                corpus = IndexedDataset(span.prefix)
                there = corpus[span.sequence][span.offset : span.offset + len(span.tokens)]
                assert there.tolist() == span.tokens.tolist()
                begin, end = corpus.document_index[span.document : span.document + 2].tolist()
                assert begin <= span.sequence < end


def test_default_batch_needs_dp(corpora: list[str]) -> None:
    config, _ = parse(flags_of(corpora[:1]))
    with pytest.raises(UserError, match="pass --global-batch-size, or the run's --dp"):
        list(trace_iteration(config, 1))
    config, _ = parse(flags_of(corpora[:1], "--dp", "2"))
    assert [sample.number for sample in trace_iteration(config, 3)] == [4, 5]


def test_a_ramp_up_moves_the_iterations(corpora: list[str]) -> None:
    """Test batches of 2, 2, 4 and then 6 samples: a run of 15 samples has four of them."""
    flags = flags_of(corpora[:1], "--global-batch-size", "6", "--rampup-batch-size", "2", "2", "6")
    at = flags.index("--train-iters")
    config, _ = parse([*flags[:at], "--train-samples", "15", *flags[at + 2 :]])
    numbers = [[sample.number for sample in trace_iteration(config, iteration)] for iteration in (1, 2, 3, 4)]
    assert numbers == [[0, 1], [2, 3], [4, 5, 6, 7], [8, 9, 10, 11, 12, 13]]
    with pytest.raises(UserError, match="--iteration 5 is not in the run: it has 4"):
        list(trace_iteration(config, 5))


def test_tool(corpora: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = flags_of(corpora[:1], "--global-batch-size", "2", "--tp", "8", "--pp", "1")
    flags[flags.index("--num-attention-heads") + 1] = "8"
    main(["--iteration", "2", *flags])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("sample")] == ["sample 2", "sample 3"]
    piece = next(line for line in lines if line.startswith("  "))
    assert f"{corpora[0]} document " in piece
    place, ids = piece.rsplit(": ", 1)
    first, last = (int(word) for word in place.rsplit(" tokens ", 1)[1].split(" to "))
    assert len(ids.split()) == last - first + 1
    sources = np.zeros(999, SOURCE)
    sources["number"] = np.arange(1, 1000)
    sources.tofile(f"{corpora[0]}.part")
    write_sources(corpora[0], ["raw.jsonl"], [Path(f"{corpora[0]}.part")])
    main(["--iteration", "2", *flags])
    document = int(piece.split(" document ")[1].split()[0])
    assert f"{place} from raw.jsonl line {document + 1}: {ids}" in capsys.readouterr().out
    for iteration in ("0", "7"):
        with pytest.raises(UserError, match=f"--iteration {iteration} is not in the run"):
            main(["--iteration", iteration, *flags])
    with pytest.raises(UserError, match="--mock-data"):
        main(["--iteration", "1", *FLAGS, "--mock-data", "--vocab-size", "9", "--global-batch-size", "2"])


def test_fill_in_middle_samples_have_the_same_spans(corpora: list[str], tmp_path: Path) -> None:
    flags = flags_of(corpora[:1], "--global-batch-size", "2")
    plain, _ = parse(flags)
    tokenizer = tmp_path / "tokenizer.json"
    marks = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>"]
    words = ["<|endoftext|>", *marks, *map(str, range(2000))]
    vocab = {word: i for i, word in enumerate(words)}
    library = Tokenizer(WordLevel(vocab, unk_token="0"))
    library.add_special_tokens(["<|endoftext|>", *marks])
    library.save(str(tokenizer))
    start = flags.index("--tokenizer-type")
    transformed, _ = parse(
        [*flags[:start], *flags[start + 4 :], "--tokenizer-model", str(tokenizer), "--fim-rate", "1"]
    )
    assert [
        [span.tokens.tolist() for span in sample.spans] for sample in trace_iteration(transformed, 2)
    ] == [[span.tokens.tolist() for span in sample.spans] for sample in trace_iteration(plain, 2)]
