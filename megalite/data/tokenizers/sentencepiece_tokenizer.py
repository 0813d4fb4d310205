"""Load tokenizers of the `sentencepiece` library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalite.data.tokenizers.hf_tokenizer import only_end
from megalite.data.tokenizers.token_ids import IdArray, id_arrays
from megalite.utils.errors import UserError

_EOD_NAMES = ("<eod>", "<EOD>", "<|endoftext|>", "</s>")


class SentencePieceTokenizer:
    """SentencePiece model; a document ends with its end-of-sentence token.

    Args:
        model_file: file of the model.
        begins_texts: begin each text with the model's beginning-of-sentence token, as in Llama 2.

    Attributes:
        vocab_size: number of its pieces.
        unk: id of the token for unknown text, or None.
    """

    def __init__(self, model_file: str, begins_texts: bool = False) -> None:
        """Read a model.

        Raises:
            UserError: the file cannot be read, lacks a required token, or the library is not installed.
        """
        self._source = model_file
        self._library = _load(model_file)
        self._begins_texts = begins_texts
        if begins_texts and self._library.bos_id() < 0:
            raise UserError(
                f"{model_file} has no beginning-of-sentence token, which Llama2Tokenizer puts before each "
                "text: pass SentencePieceTokenizer"
            )
        self.vocab_size = int(self._library.vocab_size())
        self.unk: int | None = self._library.unk_id() if self._library.unk_id() >= 0 else None

    @property
    def eod(self) -> int:
        if self._library.eos_id() >= 0:
            return int(self._library.eos_id())
        found = {name: self.token_id(name) for name in _EOD_NAMES}
        ends = {name: number for name, number in found.items() if number is not None and number >= 0}
        return only_end(ends, self._source, _EOD_NAMES, "the eos_piece of the model")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._library.encode(text, out_type=int, add_bos=self._begins_texts)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._library.encode(list(texts), out_type=int, add_bos=self._begins_texts)
        return ids

    def encode_arrays(self, texts: Sequence[bytes]) -> list[IdArray]:
        return id_arrays(self.encode_batch([text.decode() for text in texts]))

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._library.decode(list(ids))
        return text

    def token_id(self, name: str) -> int | None:
        found = int(self._library.piece_to_id(name))
        return None if found == self._library.unk_id() else found


def _load(model_file: str) -> Any:
    try:
        import sentencepiece
    except ImportError:
        raise UserError(
            "this tokenizer needs a package that is not installed: pip install sentencepiece"
        ) from None
    try:
        model = Path(model_file).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the tokenizer {model_file}: {error.strerror}") from None
    try:
        if not model:  # the library accepts it, and writes errors to stderr later
            raise ValueError
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except (RuntimeError, ValueError):
        raise UserError(f"cannot read the tokenizer {model_file}: not a SentencePiece model") from None
