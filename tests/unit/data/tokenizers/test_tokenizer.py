"""Each tokenizer against its library or reference; files that are not tokenizers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.data import TokenizerType
from megalite.data.tokenizers.tokenizer import (
    TOKENIZER_TYPES,
    ByteTokenizer,
    Tokenizer,
    TokenizerFiles,
    build_tokenizer,
)
from megalite.utils.errors import UserError

TEXTS = ["In the beginning was the word.", "  two  spaces\n\ttab", "wörld 世界 🙂", "", "<|endoftext|> 12345"]
CORPUS = [*TEXTS, "the word was with the light, and the light was the word"] * 20


def agree(ours: Tokenizer, expected: list[list[int]]) -> None:
    assert ours.encode_batch(TEXTS) == expected
    assert [ours.encode(text) for text in TEXTS] == expected
    assert max(max(ids, default=0) for ids in expected) < ours.vocab_size


@given(st.text())
@settings(max_examples=60, deadline=None)
def test_byte(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert bytes(ids) == text.encode()
    assert tokenizer.decode([*ids, tokenizer.eod]) == text
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)


def test_null() -> None:
    tokenizer = build_tokenizer("NullTokenizer", TokenizerFiles(vocab_size=100))
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.encode_batch(["3 99", "100"]) == [[3, 99], [100]]
    assert tokenizer.decode([3, 99]) == "3 99"
    for text in ("a", "101", "-1", "1.5", "٣", "9" * 30):
        with pytest.raises(UserError, match="is not a token id"):
            tokenizer.encode(text)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with vocab.json, merges.txt and tokenizer.json of one small byte-level BPE."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bpe")
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator(CORPUS, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    model.save_model(str(folder))
    # what a tokenizer.json may ask for, and text alone must not get
    model.enable_truncation(2)
    model.enable_padding(length=50)
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    model.save(str(folder / "tokenizer.json"))
    return folder


def test_gpt2_bpe_agrees_with_transformers(bpe: Path) -> None:
    transformers = pytest.importorskip("transformers")
    vocab, merges = str(bpe / "vocab.json"), str(bpe / "merges.txt")
    reference = transformers.GPT2Tokenizer(vocab, merges)
    ours = build_tokenizer("GPT2BPETokenizer", TokenizerFiles(vocab_file=vocab, merge_file=merges))
    for text in (text for text in CORPUS if "<|endoftext|>" not in text):
        assert ours.encode(text) == reference.encode(text, add_special_tokens=False)
    assert (ours.vocab_size, ours.eod) == (len(reference), reference.eos_token_id)
    assert [ours.decode(ours.encode(text)) for text in TEXTS] == TEXTS


def test_gpt2_bpe_never_reads_a_token_from_text(bpe: Path) -> None:
    files = {"vocab_file": str(bpe / "vocab.json"), "merge_file": str(bpe / "merges.txt")}
    ours = build_tokenizer(None, TokenizerFiles(**files))
    assert ours.eod not in ours.encode("a<|endoftext|>b")


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "PretrainedFromHF", None])
@pytest.mark.parametrize("how", ["tokenizer_model", "name_or_path"])
def test_hugging_face_agrees_with_tokenizers(bpe: Path, kind: str | None, how: str) -> None:
    import tokenizers

    reference = tokenizers.Tokenizer.from_file(str(bpe / "tokenizer.json"))
    reference.no_truncation()
    reference.no_padding()
    given_path = bpe / "tokenizer.json" if how == "tokenizer_model" else bpe
    ours = build_tokenizer(kind, TokenizerFiles(**{how: str(given_path)}))
    agree(ours, [reference.encode(text, add_special_tokens=False).ids for text in TEXTS])
    assert (ours.vocab_size, ours.eod) == (reference.get_vocab_size(), 0)
    assert [ours.decode(ours.encode(text)) for text in TEXTS] == TEXTS


@pytest.mark.parametrize("eos", ["word", {"content": "word", "special": True}])
def test_eod_is_the_configured_one(tmp_path: Path, eos: object) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"<unk>": 0, "</s>": 1, "word": 2}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    library.save(str(tmp_path / "tokenizer.json"))
    assert build_tokenizer("HuggingFaceTokenizer", TokenizerFiles(name_or_path=str(tmp_path))).eod == 1
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert build_tokenizer("HuggingFaceTokenizer", TokenizerFiles(name_or_path=str(tmp_path))).eod == 2
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "no such"}')
    with pytest.raises(UserError, match="eos_token 'no such'"):
        build_tokenizer("HuggingFaceTokenizer", TokenizerFiles(name_or_path=str(tmp_path)))


TWO_ENDS = {"<unk>": 0, "<eos>": 1, "word": 2, "</s>": 3}


@pytest.fixture
def two_ends(tmp_path: Path) -> Path:
    """A tokenizer.json as Gemma's: ``</s>`` is a token of web pages."""
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(TWO_ENDS, unk_token="<unk>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<eos>"])
    library.add_tokens(["</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": "<eos>"}},
        {"tokenizer_config": {"eos_token": "</s>"}, "special_tokens_map": {"eos_token": "<eos>"}},
        {
            "tokenizer_config": {"eos_token": "<eos>", "added_tokens_decoder": {}},
            "special_tokens_map": {"eos_token": "</s>"},
        },
        {"tokenizer_config": {}, "special_tokens_map": {"eos_token": {"content": "<eos>"}}},
        {
            "tokenizer_config": {
                "eos_token": "<end>",
                "added_tokens_decoder": {
                    "5": {"content": "<end>", "special": True},
                    "4": {"content": "<more>", "special": True},
                },
            }
        },
    ],
)
def test_eod_is_transformers_end(two_ends: Path, files: dict[str, dict[str, object]]) -> None:
    transformers = pytest.importorskip("transformers")
    for name, content in files.items():
        (two_ends / f"{name}.json").write_text(json.dumps(content))
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(two_ends)
    ours = build_tokenizer("HuggingFaceTokenizer", TokenizerFiles(name_or_path=str(two_ends)))
    assert (ours.eod, ours.vocab_size) == (reference.eos_token_id, len(reference))
    text = f"word </s> {reference.eos_token} word"
    assert ours.encode(text) == reference.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    "files",
    [
        {"generation_config": {"eos_token_id": [1, 2]}, "config": {"eos_token_id": 3}},
        {"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": 1}},
        {"generation_config": {}, "config": {"eos_token_id": [1]}},
        {"tokenizer_config": {"eos_token": None}, "generation_config": {"eos_token_id": 1}},
    ],
)
def test_eod_is_the_models_end_if_the_tokenizer_names_none(
    two_ends: Path, files: dict[str, dict[str, object]]
) -> None:
    for name, content in files.items():
        (two_ends / f"{name}.json").write_text(json.dumps(content))
    assert build_tokenizer("HuggingFaceTokenizer", TokenizerFiles(name_or_path=str(two_ends))).eod == 1


def test_several_known_ends_are_named(two_ends: Path) -> None:
    tokenizer = build_tokenizer("HuggingFaceTokenizer", TokenizerFiles(name_or_path=str(two_ends)))
    with pytest.raises(UserError, match=r"several tokens that may end a document.*: </s>, <eos>; name it as"):
        _ = tokenizer.eod


def test_ends_of_two_files(bpe: Path, tmp_path: Path) -> None:
    """Megatron's name comes first, unless a file says otherwise, as in the folder of an OPT."""
    vocab = json.loads((bpe / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | {"</s>": len(vocab)}))
    files = {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(bpe / "merges.txt")}
    assert build_tokenizer("GPT2BPETokenizer", TokenizerFiles(**files)).eod == vocab["<|endoftext|>"]
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert build_tokenizer("GPT2BPETokenizer", TokenizerFiles(**files)).eod == len(vocab)


def test_missing_eod_is_named_when_it_is_needed(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "t.json"))
    tokenizer = build_tokenizer(None, TokenizerFiles(tokenizer_model=str(tmp_path / "t.json")))
    with pytest.raises(UserError, match="no end-of-document token"):
        _ = tokenizer.eod


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_word_pieces_agree_with_transformers(tmp_path: Path, kind: str) -> None:
    """And a special token in a text is text, as in the original BERT."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    model = tokenizers.BertWordPieceTokenizer(lowercase=False)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    model.train_from_iterator(CORPUS, vocab_size=120, special_tokens=special, show_progress=False)
    model.save_model(str(tmp_path))
    ours = build_tokenizer(kind, TokenizerFiles(vocab_file=str(tmp_path / "vocab.txt")))
    theirs = transformers.BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=kind.endswith("LowerCase"))
    agree(ours, [theirs(text, add_special_tokens=False)["input_ids"] for text in TEXTS])
    ids = ours.encode("The Word was [MASK] [SEP]")
    assert not {2, 3, 4} & set(ids)
    assert (ours.encode("THE WORD") == ours.encode("the word")) == kind.endswith("LowerCase")
    assert ours.decode(ours.encode("the word was")) == "the word was"
    (tmp_path / "vocab.txt").write_text("one\ntwo\n")
    with pytest.raises(UserError, match=r"has no token \[UNK\]: pass BERT's vocab.txt"):
        build_tokenizer(kind, TokenizerFiles(vocab_file=str(tmp_path / "vocab.txt")))


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", None])
def test_sentencepiece_agrees_with_its_library(tmp_path: Path, kind: str | None) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, vocab_size=45, minloglevel=2
    )
    path = tmp_path / "sp.model"
    path.write_bytes(model.getvalue())
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ours = build_tokenizer(kind, TokenizerFiles(tokenizer_model=str(path)))
    agree(ours, [reference.encode_as_ids(text) for text in TEXTS])
    assert (ours.vocab_size, ours.eod) == (45, reference.eos_id())
    assert ours.decode(ours.encode(TEXTS[0])) == TEXTS[0]


def test_llama2_begins_each_text(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    for name, options in (("with", {}), ("without", {"bos_id": -1})):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS),
            model_prefix=str(tmp_path / name),
            vocab_size=44,
            minloglevel=2,
            **options,
        )
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "with.model"))
    ours = build_tokenizer("Llama2Tokenizer", TokenizerFiles(tokenizer_model=str(tmp_path / "with.model")))
    agree(ours, [[reference.bos_id(), *reference.encode_as_ids(text)] for text in TEXTS])
    with pytest.raises(UserError, match="no beginning-of-sentence token"):
        build_tokenizer("Llama2Tokenizer", TokenizerFiles(tokenizer_model=str(tmp_path / "without.model")))


def test_unknown_tokens_are_known(tmp_path: Path, bpe: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.save(str(tmp_path / "words.json"))
    assert build_tokenizer(None, TokenizerFiles(tokenizer_model=str(tmp_path / "words.json"))).unk == 1  # type: ignore[attr-defined]
    assert build_tokenizer(None, TokenizerFiles(name_or_path=str(bpe))).unk is None  # type: ignore[attr-defined]


def test_the_configs_types_are_those_that_can_be_built() -> None:
    assert set(get_args(TokenizerType)) == set(TOKENIZER_TYPES)


@pytest.mark.parametrize(
    ("kind", "files", "message"),
    [
        ("TikTokenizer", {}, "--tokenizer-type TikTokenizer is not supported: pass the tokenizer.json"),
        ("BertWordPieceCase", {}, "needs --vocab-file vocab.txt"),
        ("BertWordPieceCase", {"vocab_file": "no/such.txt"}, "cannot read the tokenizer no/such.txt"),
        ("Llama2Tokenizer", {}, "needs --tokenizer-model"),
        ("GPT2BPETokeniser", {}, "did you mean GPT2BPETokenizer"),
        ("gpt2bpetokenizer", {}, "did you mean GPT2BPETokenizer"),
        ("xyz", {}, "pass one of byte, "),
        (None, {}, "there is no tokenizer"),
        ("GPT2BPETokenizer", {"vocab_file": "v"}, "needs --merge-file"),
        ("HuggingFaceTokenizer", {}, "needs --tokenizer-model"),
        ("SentencePieceTokenizer", {}, "needs --tokenizer-model"),
        ("NullTokenizer", {}, "needs a positive --vocab-size"),
        ("NullTokenizer", {"vocab_size": 0}, "needs a positive --vocab-size"),
        ("HuggingFaceTokenizer", {"name_or_path": "no/such"}, "there is no tokenizer at no/such"),
        ("HuggingFaceTokenizer", {"name_or_path": "/no/such/folder/x"}, "there is no tokenizer at"),
    ],
)
def test_mistakes_are_named(kind: str | None, files: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build_tokenizer(kind, TokenizerFiles(**files))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2]", b"\xff\xfe\x00", b'{"a": 1}'])
def test_unreadable_files_are_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    for kind, files in (
        ("HuggingFaceTokenizer", {"tokenizer_model": str(path)}),
        ("HuggingFaceTokenizer", {"name_or_path": str(tmp_path)}),
        ("SentencePieceTokenizer", {"tokenizer_model": str(path)}),
        ("GPT2BPETokenizer", {"vocab_file": str(path), "merge_file": str(path)}),
        ("GPT2BPETokenizer", {"vocab_file": str(tmp_path), "merge_file": str(path)}),
        ("SentencePieceTokenizer", {"tokenizer_model": str(tmp_path / "none")}),
    ):
        with pytest.raises(UserError, match=str(tmp_path)) as caught:
            build_tokenizer(kind, TokenizerFiles(**files))
        assert "\n" not in str(caught.value)


def test_an_expression_that_backtracks_without_end_is_one_line(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer(
        "HuggingFaceTokenizer", TokenizerFiles(tokenizer_model=str(tmp_path / "tokenizer.json"))
    )
    assert tokenizer.encode("ab") == [0, 1]
    text = "a" * 30 + "b"
    with pytest.raises(UserError, match=r"tokenizer.json fails on a text \(.*retry-limit"):
        tokenizer.encode(text)
    with pytest.raises(UserError, match="fails on a text"):
        tokenizer.encode_batch([text])


def test_types_are_those_of_the_contract() -> None:
    assert {"byte", "GPT2BPETokenizer", "HuggingFaceTokenizer", "PretrainedFromHF", "NullTokenizer"} < set(
        TOKENIZER_TYPES
    )
