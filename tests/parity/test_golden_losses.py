"""The losses of the models of the layout table stay what they are from version to version.

A run that is resumed with a later megalite goes on as before, and a change of the code that should change no
value is seen to change none. After a change that should, record the losses again:

    python -m tests.parity.test_golden_losses
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from megalite.observe.verify.compare_runs import TOLERANCES
from tests.parity.conftest import write_corpus
from tests.parity.models import GEMMA4_E2B, MODELS, MUON, SWITCHES, reference

GOLDEN = Path(__file__).with_name("golden_losses.json")
ALL_MODELS = [*MODELS, *SWITCHES, GEMMA4_E2B, MUON]


def _values(model: str, corpus: str) -> dict[str, list[float]]:
    run = reference(model, "fp64", corpus)
    return {"losses": run.losses, "grad_norms": run.grad_norms}


@pytest.mark.parametrize("model", ALL_MODELS)
def test_losses_and_gradient_norms(model: str, corpus: str) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))[model]
    tolerance = TOLERANCES["fp64"]  # another processor or torch adds in another order, as another layout does
    found = _values(model, corpus)
    assert found["losses"] == pytest.approx(golden["losses"], rel=tolerance.loss)
    assert found["grad_norms"] == pytest.approx(golden["grad_norms"], rel=tolerance.grad_norm)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder))
        golden = {model: _values(model, corpus) for model in ALL_MODELS}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
