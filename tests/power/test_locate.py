"""A bisection names the place of injected errors."""

from __future__ import annotations

import re

import pytest

from tests.power.catalogue import CATALOGUE
from tests.power.locate import PAGE, PLACES, locate
from tests.power.measure import BY_NAME, MODELS

SAMPLE = (
    "row layers are not summed",
    "gradients are not summed over replicas",
    "a stage reads the message before",
    "updated weights are not gathered",
    "input gradients of column layers are not summed",
    "gradients of gathered keys are means",
    "embeddings for later layers have a gradient of 0",
)
WRONG_OPERATION = {
    "groups of shards are not summed",
    "the maximum of the logits is not reduced",
    "the sums of the cross-entropy are not reduced",
    "the gradient of shared keys and values is not summed",
    "input gradients are cut instead of reduce-scattered",
    "every rank adds BERT's order loss",
    "gradients of gathered keys are cut instead of reduce-scattered",
    "tokens with a loss are counted on the rank",
    "other ranks' momentum is not exchanged",
    "a norm over all heads uses the rank's heads alone",
    "the gradient of a norm over all heads is that of the rank's heads",
    "a router counts the rows of its slice",
    "gradients of experts are means over their replicas",
}
"""A collective is missing and the values are no parts of a sum, the loss is recorded too late, or another
bucket is reduced last."""


@pytest.mark.parametrize("name", SAMPLE)
def test_the_place_of_a_sample_is_named(name: str) -> None:
    (found,) = locate([BY_NAME[name]])
    assert found.names_module and found.names_operation, found.text


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_place_of_every_rated_error_is_named(model: str) -> None:
    rated = [error for error in CATALOGUE if error.model == model and error.name in PLACES]
    found = [*locate(rated)]
    assert [each.text for each in found if not each.names_module] == []
    assert {each.error.name for each in found if not each.names_operation} <= WRONG_OPERATION


def test_rated_errors_exist_and_the_page_has_them() -> None:
    assert PLACES.keys() | WRONG_OPERATION <= BY_NAME.keys()
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in PLACES if f"| {name} |" not in text] == []
    ((rated, tensors, operations),) = re.findall(
        r"(\d+) errors are rated.*? for (\d+) of.*? for (\d+)\.", text
    )
    summary = " ".join(PAGE.parents[1].joinpath("verification.md").read_text(encoding="utf-8").split())
    assert f"for {tensors} of {rated} rated errors, and also the right operation for {operations}" in summary
