"""The configuration of the corpus, its splits and the tokenizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from megalite.config.model.transformer import IS_BERT
from megalite.config.option import (
    LOCAL_PATH,
    POSITIVE,
    SHARE,
    AnyOf,
    Conflicts,
    OnResume,
    Range,
    Setting,
    flag_of,
    option,
)

TokenizerType = Literal[
    "byte",
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "HuggingFaceTokenizer",
    "PretrainedFromHF",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "NullTokenizer",
]

_NEEDED_FILES: dict[TokenizerType, tuple[tuple[str, ...], ...]] = {
    "byte": (),
    "GPT2BPETokenizer": (("vocab_file",), ("merge_file",)),
    "BertWordPieceLowerCase": (("vocab_file",),),
    "BertWordPieceCase": (("vocab_file",),),
    "HuggingFaceTokenizer": (("tokenizer_model", "tokenizer_name_or_path"),),
    "PretrainedFromHF": (("tokenizer_name_or_path", "tokenizer_model"),),
    "SentencePieceTokenizer": (("tokenizer_model",),),
    "GPTSentencePieceTokenizer": (("tokenizer_model",),),
    "Llama2Tokenizer": (("tokenizer_model",),),
    "NullTokenizer": (),
}
"""The fields that each tokenizer needs: one field of each tuple."""

WORD_PIECE_TOKENIZERS = (
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "HuggingFaceTokenizer",
    "PretrainedFromHF",
)
"""Kinds of tokenizers that may be BERT's. For a tokenizer.json only its vocabulary can tell."""

WEIGHTED_SPLIT_FIELDS = tuple(
    f"{split}_weighted_split_paths{path}" for split in ("train", "valid", "test") for path in ("", "_path")
)
CORPUS_FIELDS = (
    "data_path",
    "data_args_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "per_split_data_args_path",
    "data_phases",
    *WEIGHTED_SPLIT_FIELDS,
)
"""Every field that names corpora."""

TOKENIZER_FIELDS = (
    "tokenizer_type",
    "tokenizer_model",
    "vocab_file",
    "merge_file",
    "tokenizer_name_or_path",
)
"""Every field that names the tokenizer or one of its files."""


def split_weights(text: str) -> list[float]:
    """Return the weights of --split; empty if they are not one to three numbers with a positive sum.

    Quotes around the weights are ignored: in a shell array, "--split '99,1,0'" passes the inner quotes on.
    """
    try:
        weights = [float(weight) for weight in text.strip("'\"").split(",")]
    except ValueError:
        return []
    usable = len(weights) <= 3 and all(0 <= weight < math.inf for weight in weights) and sum(weights) > 0
    return weights if usable else []


_SPLIT = Range(
    split_weights, "weights of training, validation and test, as in 949,50,1", "is not a split: pass"
)
DOCUMENT_OPTIONS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
"""Options that act at the end of a document."""
_READS_CORPUS = Setting("mock_data", (False,), "--mock-data does not read a corpus")
_NO_PHASES = Setting("data_phases", (None,), "--data-phases always reads windows")
_READS_WINDOWS = AnyOf(
    ("data_phases", "sample_order"),
    "samples are not windows: pass --sample-order windows",
    lambda value: value not in ("megatron", None),
)
_CORPUS: dict[str, Any] = {"on_resume": OnResume.CORPUS, "only_with": _READS_CORPUS}
_OWN_SETS = Setting(
    "valid_weighted_split_paths", ((),), "--valid-weighted-split-paths names validation sets of its own"
)
_PACKS = Setting("document_packing", ("best_fit",))
_REARRANGES = (Setting("fim_rate"), _READS_CORPUS)


@dataclass(frozen=True)
class DataConfig:
    """Options of the corpus, its splits, and the tokenizer that it was preprocessed with."""

    default_on_resume: ClassVar[OnResume] = OnResume.DATA

    data_path: tuple[str, ...] = option((), **_CORPUS)
    """Prefix of a .bin/.idx pair of files. Several prefixes, or WEIGHT PREFIX WEIGHT PREFIX ..., make a
    blend."""
    aml_data_download_path: str | None = option(None, **_CORPUS, allowed=LOCAL_PATH)
    """Base folder for relative corpus prefixes, in --data-path and similar flags. In an Azure ML job it is an
    input folder."""
    data_args_path: str | None = option(None, **_CORPUS, allowed=LOCAL_PATH)
    """File with the arguments of --data-path."""
    train_data_path: tuple[str, ...] = option((), **_CORPUS)
    """Corpora of the training set alone, as in --data-path; --split does not apply."""
    valid_data_path: tuple[str, ...] = option((), **_CORPUS)
    """Corpora of the validation set, as in --train-data-path."""
    test_data_path: tuple[str, ...] = option((), **_CORPUS)
    """Corpora of the test set, evaluated after training, as in --train-data-path."""
    per_split_data_args_path: str | None = option(None, **_CORPUS, allowed=LOCAL_PATH)
    """JSON file with the arguments of --train-, --valid- and --test-data-path: {"train": [...], "valid":
    [...], "test": [...]}."""
    multiple_validation_sets: bool = option(
        False, on_resume=OnResume.LOGGED, only_with=(_READS_CORPUS, _OWN_SETS)
    )
    """Evaluate on the validation part of each corpus alone, and log its loss by name, instead of on a
    blend."""
    validation_set_names: tuple[str, ...] = option(
        (), on_resume=OnResume.LOGGED, only_with="multiple_validation_sets"
    )
    """Names of these validation sets, in the order of the corpora. By default the names of their files."""
    data_phases: str | None = option(None, **_CORPUS, allowed=LOCAL_PATH)
    """YAML file of a mixture that changes during training: its sources and phases. It reads each source in
    windows (see --sample-order)."""
    train_weighted_split_paths: tuple[str, ...] = option((), **_CORPUS)
    """Blend to train on, quoted: "NAME: WEIGHT BEGIN:END PREFIX, ...". BEGIN:END is a part of 0:1."""
    train_weighted_split_paths_path: str | None = option(None, **_CORPUS, allowed=LOCAL_PATH)
    """File with the argument of --train-weighted-split-paths, quotes included."""
    valid_weighted_split_paths: tuple[str, ...] = option((), **_CORPUS)
    """Blends to validate on, as in --train-weighted-split-paths. Each is evaluated and logged by its NAME."""
    valid_weighted_split_paths_path: str | None = option(None, **_CORPUS, allowed=LOCAL_PATH)
    """File with the argument of --valid-weighted-split-paths, quotes included."""
    test_weighted_split_paths: tuple[str, ...] = option((), **_CORPUS)
    """Blends to test on after training, as in --valid-weighted-split-paths."""
    test_weighted_split_paths_path: str | None = option(None, **_CORPUS, allowed=LOCAL_PATH)
    """File with the argument of --test-weighted-split-paths, quotes included."""
    blend_by: Literal["tokens", "documents"] = option("tokens", **_CORPUS)
    """How to weight datasets that have no explicit weight: by tokens (in whole samples) or by documents."""
    sample_order: Literal["megatron", "windows"] = option("megatron", only_with=(_READS_CORPUS, _NO_PHASES))
    """Order of GPT samples. megatron: documents and all epochs are shuffled together; windows: each epoch by
    itself, of the corpus as it lies, without an index."""
    shuffle_block: int | None = option(None, only_with=(_READS_CORPUS, _READS_WINDOWS), allowed=POSITIVE)
    """Windows: number of neighbours that are shuffled as one and fetched together from object storage. By
    default 64 if a corpus is there, else 1."""
    data_cache_path: str | None = option(
        None, on_resume=OnResume.FREE, only_with=_READS_CORPUS, differs_between_ranks=True, allowed=LOCAL_PATH
    )
    """Folder to cache sample indices in. By default PREFIX/cache next to each large corpus."""
    data_cache_bytes: int = option(
        64 << 30,
        on_resume=OnResume.FREE,
        only_with=_READS_CORPUS,
        differs_between_ranks=True,
        allowed=POSITIVE,
    )
    """Bytes on the local disk that the cache of corpora in object storage may take, for all ranks of a
    machine."""
    fim_rate: float = option(0.0, allowed=SHARE, only_with=_READS_CORPUS)
    """Fill-in-the-middle: share of the training documents to rearrange. They are split into prefix, suffix
    and middle."""
    fim_spm_rate: float = option(0.5, allowed=SHARE, only_with=_REARRANGES)
    """Fill-in-the-middle: share of these documents in the order suffix, prefix, middle (SPM)."""
    fim_prefix_token: str = option("<fim_prefix>", only_with=_REARRANGES)
    """Fill-in-the-middle: token of the vocabulary that marks the prefix."""
    fim_middle_token: str = option("<fim_middle>", only_with=_REARRANGES)
    """Fill-in-the-middle: token of the vocabulary that marks the middle."""
    fim_suffix_token: str = option("<fim_suffix>", only_with=_REARRANGES)
    """Fill-in-the-middle: token of the vocabulary that marks the suffix."""
    short_seq_prob: float = option(0.1, allowed=SHARE, only_with=IS_BERT)
    """BERT: share of the samples that are shortened on purpose."""
    reset_position_ids: bool = option(
        False, only_with=Setting("position_embedding_type", ("learned_absolute", "rope"))
    )
    """Restart position ids at 0 in each document of a sample."""
    reset_attention_mask: bool = False
    """Mask attention between documents: a token attends only to its own document."""
    eod_mask_loss: bool = False
    """Mask the loss where the input is an end-of-document token. The loss is the mean over the other
    tokens."""
    document_packing: Literal["concatenate", "best_fit"] = "concatenate"
    """How documents fill samples. concatenate: one after the other, cut where a sample ends; best_fit: whole
    documents, apart from each other, and padding."""
    sft: bool = False
    """Fine-tune on conversations, preprocessed with --chat: only the assistant's tokens have a loss."""
    sft_packing: bool = option(True, only_with="sft")
    """Pack several whole conversations into each sample, apart from each other; otherwise one."""
    sft_long_conversations: Literal["truncate", "drop"] = option(
        "truncate", only_with=(Setting("sft"), _READS_CORPUS)
    )
    """What to do with a conversation of more than --seq-length + 1 tokens: cut off its end, or drop it."""
    mock_data: bool = False
    """Train on random tokens instead of a corpus, to test a configuration or its speed."""
    split: str = option("969,30,1", allowed=_SPLIT, **_CORPUS)
    """Weights of the training, validation and test parts of each dataset."""
    tokenizer_type: TokenizerType | None = option(
        None, on_resume=OnResume.TOKENIZER, choices={"HFTokenizer": "HuggingFaceTokenizer"}
    )
    """Tokenizer that the corpus was preprocessed with. By default it is detected from the tokenizer's
    files."""
    tokenizer_model: str | None = option(None, on_resume=OnResume.TOKENIZER, allowed=LOCAL_PATH)
    """Tokenizer file: a tokenizer.json or a SentencePiece .model."""
    vocab_file: str | None = option(None, on_resume=OnResume.TOKENIZER, allowed=LOCAL_PATH)
    """Vocabulary file of a GPT-2 tokenizer (a JSON object) or a BERT tokenizer (one token a line)."""
    merge_file: str | None = option(None, on_resume=OnResume.TOKENIZER, allowed=LOCAL_PATH)
    """Merge file of a GPT-2 tokenizer (merges.txt)."""
    tokenizer_name_or_path: str | None = option(None, on_resume=OnResume.TOKENIZER, allowed=LOCAL_PATH)
    """Folder of a Hugging Face tokenizer, or its tokenizer.json."""

    conflicts: ClassVar[Conflicts] = {
        **{
            f"{split}_weighted_split_paths": {
                f"{split}_weighted_split_paths_path": ": both set the same option; remove one"
            }
            for split in ("train", "valid", "test")
        },
        ("fim_rate", "sft", _PACKS, *DOCUMENT_OPTIONS): {IS_BERT: ": it is an option of GPT; remove it"},
        DOCUMENT_OPTIONS: {
            "sft": ", which separates conversations by itself: remove it",
            _PACKS: ", which separates documents by itself: remove it",
        },
        (Setting("sample_order", ("windows",)), "data_phases"): {
            ("sft", _PACKS, IS_BERT): ", whose samples are no windows of a corpus: remove one",
        },
        "fim_rate": {("sft", _PACKS): ": it rearranges text; remove --fim-rate"},
        "sft": {_PACKS: ": --sft packs conversations by itself; remove --document-packing"},
    }

    @property
    def document_options(self) -> tuple[str, ...]:
        """Return the names of the enabled options that act at the end of a document."""
        return tuple(name for name in DOCUMENT_OPTIONS if getattr(self, name))

    @property
    def packs_documents(self) -> bool:
        """Return whether samples hold whole documents."""
        return self.document_packing == "best_fit"

    @property
    def reads_windows(self) -> bool:
        """Return whether samples are windows of the corpus, in epochs that are shuffled apart."""
        return self.sample_order == "windows" or self.data_phases is not None

    @property
    def masks_loss(self) -> bool:
        """Return whether tokens have no loss, which are counted while a batch runs."""
        return self.eod_mask_loss or self.sft or self.packs_documents

    @property
    def masks_attention(self) -> bool:
        """Return whether attention stays within the documents of a sample."""
        return self.reset_attention_mask or self.packs_documents or (self.sft and self.sft_packing)

    def corpus_options(self) -> list[tuple[str, ...]]:
        """Return the ways in which corpora are set, each as a tuple of fields; a run must have one way."""
        ways = (
            ("data_path",),
            ("data_args_path",),
            ("train_data_path", "valid_data_path", "test_data_path"),
            ("per_split_data_args_path",),
            ("data_phases",),
            WEIGHTED_SPLIT_FIELDS,
        )
        used = [tuple(name for name in way if getattr(self, name)) for way in ways]
        return [way for way in used if way]

    @property
    def resolved_tokenizer_type(self) -> TokenizerType | None:
        """Return the tokenizer type as set, or as detected from its files; None without either."""
        return self.tokenizer_type or tokenizer_type_for(
            self.tokenizer_model, self.vocab_file, self.merge_file, self.tokenizer_name_or_path
        )

    def files_missing_for(self, kind: TokenizerType) -> list[str]:
        """Return the flags of the files that this tokenizer lacks, each with its alternatives."""
        return [
            " or ".join(flag_of(name) for name in names)
            for names in _NEEDED_FILES[kind]
            if all(getattr(self, name) is None for name in names)
        ]


def tokenizer_type_for(
    model: str | None, vocab_file: str | None, merge_file: str | None, name_or_path: str | None
) -> TokenizerType | None:
    """Return the kind of tokenizer that has these files; None without files."""
    if vocab_file is not None and merge_file is None and not _is_json(vocab_file):
        return "BertWordPieceLowerCase"  # GPT-2's vocabulary is JSON
    if vocab_file is not None or merge_file is not None:
        return "GPT2BPETokenizer"
    if name_or_path is not None:
        return "HuggingFaceTokenizer"
    if model is not None:
        return "HuggingFaceTokenizer" if model.endswith(".json") else "SentencePieceTokenizer"
    return None


def _is_json(path: str) -> bool:
    """Return whether a file holds a JSON object; if it cannot be read, whether its name ends in .json."""
    try:
        with open(path, "rb") as file:
            return file.read(1024).lstrip()[:1] == b"{"
    except OSError:
        return path.endswith(".json")
