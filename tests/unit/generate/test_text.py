"""Text decoded token by token: nothing is lost, and no character is shown before it is complete."""

import pytest

from megalite.data.tokenizers.tokenizer import ByteTokenizer, NullTokenizer, build_tokenizer
from megalite.generate.generator import TextStream, text_of

TEXTS = ["plain words", "naïve – “quoted” 日本語", "two\n\nlines  and 🙂🙂 more"]


def bpe():
    return build_tokenizer("HuggingFaceTokenizer", tokenizer_model="scripts/corpus/tokenizer.json")


@pytest.mark.parametrize("build", [ByteTokenizer, bpe])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_make_up_the_text(text, build, monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    tokenizer = build()
    prompt, ids = tokenizer.encode("In the"), tokenizer.encode(text)
    stream = TextStream(tokenizer, prompt)
    pieces = [stream.add(i) for i in ids]
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert "".join([*pieces, stream.finish()]) == text
    assert text_of(tokenizer, prompt, ids) == text


def test_a_character_that_never_ends_is_replaced():
    tokenizer = ByteTokenizer()
    ids = [*b"ab", *"é".encode()[:1]]
    assert text_of(tokenizer, [32], ids) == "ab\N{REPLACEMENT CHARACTER}"
    many = text_of(tokenizer, [32], [0xFF] * 30 + [*b"c"])
    assert many.endswith("c")
    assert set(many[:-1]) == {"\N{REPLACEMENT CHARACTER}"}


def test_spaces_between_words():
    assert text_of(NullTokenizer(100), [1, 2], [3, 40]) == " 3 40"
