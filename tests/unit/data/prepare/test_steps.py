"""The filters, each against its library or a search in plain Python."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.prepare.steps import DatatroveStep, DecontaminateStep, Document, LanguageStep
from megalite.utils.errors import UserError

from .conftest import plan_of, run, texts_of, write_texts

WORDS = st.lists(st.sampled_from("abc"), max_size=12)


@settings(max_examples=60, deadline=None)
@given(items=st.lists(WORDS, min_size=1, max_size=3), texts=st.lists(WORDS, max_size=6))
def test_decontamination_finds_every_run_of_words(
    tmp_path_factory: pytest.TempPathFactory, items: list[list[str]], texts: list[list[str]]
) -> None:
    def runs(words: list[str]) -> set[tuple[str, ...]]:
        return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}

    path = tmp_path_factory.getbasetemp() / "eval.jsonl"
    path.write_text("".join(json.dumps({"question": " ".join(words)}) + "\n" for words in items))
    step = DecontaminateStep((str(path),), ngram=3, key="question")
    if not any(map(runs, items)):
        with pytest.raises(UserError, match="has 3 words: lower its ngram"):
            step.start()
        return
    reasons = step.start()([Document("  ".join(words).upper() + "!") for words in texts])
    for words, reason in zip(texts, reasons, strict=True):
        matched = {f"{path} line {i}" for i, item in enumerate(items, 1) if runs(item) & runs(words)}
        assert reason in (matched or {""})


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "functions_of_a_user"
    lines = ["def long(text): return len(text) > 2", "def louder(text): return text.upper()"]
    (tmp_path / f"{name}.py").write_text("\n".join([*lines, "def wrong(text): return 3", "calls = []"]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_python_filters_and_changes_texts(tmp_path: Path, user_module: str) -> None:
    pytest.importorskip("xxhash")
    write_texts(tmp_path / "in", [["abc", "b", "ABC", "long text"]])
    change, keep = {"python": f"{user_module}:louder"}, {"python": f"{user_module}:long"}
    report = run(plan_of(tmp_path, steps=[change, {"exact": True}, keep]))
    assert texts_of(tmp_path) == ["ABC", "LONG TEXT"]  # what deduplication compared is what is written
    assert [(step["step"], step["documents_out"]) for step in report["steps"]] == [
        (f"python {user_module}:louder", 4), ("exact", 3), (f"python {user_module}:long", 2)
    ]  # fmt: skip
    with pytest.raises(UserError, match="returned a int: return True"):
        run(plan_of(tmp_path, output=str(tmp_path / "wrong"), steps=[{"python": f"{user_module}:wrong"}]))


def test_a_changed_function_is_another_corpus(tmp_path: Path, user_module: str) -> None:
    write_texts(tmp_path / "in", [["abc"]])
    steps = [{"python": f"{user_module}:long"}]
    before = plan_of(tmp_path, steps=steps).digest
    assert plan_of(tmp_path, steps=steps).digest == before
    with (tmp_path / f"{user_module}.py").open("a") as file:
        file.write("\n")
    assert plan_of(tmp_path, steps=steps).digest != before


def test_a_filter_of_datatrove_decides_as_in_datatrove() -> None:
    filters = pytest.importorskip("datatrove.pipeline.filters")
    data = pytest.importorskip("datatrove.data")
    theirs = filters.RegexFilter("[0-9]+ dogs")
    texts = ["12 dogs", "dogs", "1 cat", "99 dogs bark"]
    run_filter = DatatroveStep("RegexFilter", {"regex_exp": "[0-9]+ dogs"}).start()
    for text, reason in zip(texts, run_filter([Document(text) for text in texts]), strict=True):
        assert bool(theirs.filter(data.Document(text=text, id=""))) == (reason == "")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("RegexFilte", {}, "is unknown; nearest is RegexFilter"),
        ("RegexFilter", {"regexp": "a"}, "has no argument 'regexp'; nearest is regex_exp"),
        ("LanguageFilter", {}, "downloads a file: use the step language"),
        ("URLFilter", {"extra_domain": []}, "has no argument 'extra_domain'; nearest is extra_domains"),
    ],
)
def test_a_mistake_with_datatrove_is_named(name: str, arguments: dict[str, Any], message: str) -> None:
    pytest.importorskip("datatrove.pipeline.filters")
    with pytest.raises(UserError, match=message):
        DatatroveStep(name, arguments).start()


def test_languages_are_those_of_fasttext(tmp_path: Path) -> None:
    fasttext = pytest.importorskip("fasttext")
    lines = [("en", "the dog and the cat"), ("de", "der Hund und die Katze")]
    (tmp_path / "train").write_text("".join(f"__label__{label} {text}\n" for label, text in lines * 99))
    model, texts = str(tmp_path / "lid.bin"), ["the\ndog", "die Katze", "und", ""]
    fasttext.train_supervised(str(tmp_path / "train"), thread=1, verbose=0).save_model(model)
    documents = [Document(text) for text in texts]
    reasons = LanguageStep(model, ("de",), 0.5).start()(documents)
    predict = fasttext.load_model(model).f.predict
    for document, reason in zip(documents[:3], reasons, strict=False):
        ((score, label),) = predict(document.text.replace("\n", " ") + "\n", 1, 0.0, "strict")
        assert label == f"__label__{document.label}"
        assert (reason == "") == (label == "__label__de" and score >= 0.5)
    with pytest.raises(UserError, match=r"there is no model none\.bin"):
        LanguageStep("none.bin", ("de",)).start()
