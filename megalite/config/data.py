"""Where the tokens come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalite.config.flags import flag_of

TokenizerType = Literal[
    "byte",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "PretrainedFromHF",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "NullTokenizer",
]

_NEEDED_FILES: dict[TokenizerType, tuple[tuple[str, ...], ...]] = {
    "byte": (),
    "GPT2BPETokenizer": (("vocab_file",), ("merge_file",)),
    "HuggingFaceTokenizer": (("tokenizer_model", "tokenizer_name_or_path"),),
    "PretrainedFromHF": (("tokenizer_name_or_path", "tokenizer_model"),),
    "SentencePieceTokenizer": (("tokenizer_model",),),
    "GPTSentencePieceTokenizer": (("tokenizer_model",),),
    "NullTokenizer": (),
}
"""For each tokenizer the fields it cannot do without, one of each tuple."""


@dataclass(frozen=True)
class DataConfig:
    """The corpus, its split and the tokenizer it was made with."""

    data_path: tuple[str, ...] = ()
    """Prefixes of .bin/.idx pairs, or weight prefix weight prefix ... for a blend."""
    mock_data: bool = False
    """Train on random tokens instead of a corpus, to try a config or measure its speed."""
    split: str = "969,30,1"
    """Weights of the train, validation and test parts of each dataset."""
    tokenizer_type: TokenizerType | None = None
    """The tokenizer that the corpus was made with; by default the one that the given files are for."""
    tokenizer_model: str | None = None
    """File of the tokenizer: a tokenizer.json or a SentencePiece .model."""
    vocab_file: str | None = None
    """GPT-2's vocab.json."""
    merge_file: str | None = None
    """GPT-2's merges.txt."""
    tokenizer_name_or_path: str | None = None
    """Folder of a Hugging Face tokenizer, or its tokenizer.json."""

    @property
    def resolved_tokenizer_type(self) -> TokenizerType | None:
        """The tokenizer as given, or the one that the given files are for; None where there is neither."""
        if self.tokenizer_type is not None:
            return self.tokenizer_type
        if self.vocab_file is not None or self.merge_file is not None:
            return "GPT2BPETokenizer"
        if self.tokenizer_name_or_path is not None:
            return "HuggingFaceTokenizer"
        if self.tokenizer_model is not None:
            is_json = self.tokenizer_model.endswith(".json")
            return "HuggingFaceTokenizer" if is_json else "SentencePieceTokenizer"
        return None

    def files_missing_for(self, kind: TokenizerType) -> list[str]:
        """Flags of the files that this tokenizer lacks, each with its alternatives."""
        return [
            " or ".join(flag_of(name) for name in names)
            for names in _NEEDED_FILES[kind]
            if all(getattr(self, name) is None for name in names)
        ]
