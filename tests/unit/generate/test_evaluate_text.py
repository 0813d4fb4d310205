"""Every token of a stream is counted once, with at least the context that the stride allows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megalite.config.presets import PRESETS
from megalite.data.microbatch import Microbatch
from megalite.data.samples import DocumentEnds
from megalite.generate.evaluate_text import LossMeter, windows
from tests.stages import build_stage


@pytest.mark.parametrize("num_pieces", [1, 7])
@pytest.mark.parametrize("stride", [1, 3, 8])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 9, 10, 17, 50])
def test_each_label_is_counted_once(length, stride, num_pieces):
    stream = np.arange(length) + 100
    counted = []
    for text, part in windows(np.array_split(stream, num_pieces), 8, stride):
        assert len(text) == 9
        inputs, labels = text[:-1], text[1:]
        assert (labels[part] == inputs[part] + 1).all()
        for place in range(8)[part]:
            context = place + 1
            assert context >= min(8 - stride + 1, labels[place] - 100)
            assert (inputs[: place + 1] == labels[place] - np.arange(context, 0, -1)).all()
        counted += labels[part].tolist()
    assert counted == stream[1:].tolist()


@pytest.mark.parametrize("has_ends", [False, True])
@pytest.mark.parametrize("stride", [3, 8])
def test_the_loss_is_that_of_each_token_after_its_own_context(stride, has_ends, one_rank):
    """Against a forward over the context alone: from the window's start, or from that of the document."""
    length, eod = 8, 30
    model = replace(PRESETS["llama-tiny"], num_layers=1, vocab_size=31, seq_length=length)
    model = replace(model, params_dtype="fp64", init_method_std=0.3)
    stage = build_stage(model, one_rank, range(1), seed=3, has_documents=has_ends).eval()
    stream = np.random.default_rng(0).integers(0, eod, 30)
    stream[[4, 11, 12, 19]] = eod
    ends = DocumentEnds(eod, True, True, True, on_every_stage=True) if has_ends else None
    total, num_tokens = LossMeter(stage, one_rank, ends, batch_size=3)(windows([stream], length, stride))

    losses = []
    for place in range(1, len(stream)):
        start = max(0, -(-(place - length) // stride)) * stride  # of the first window that has the label
        if has_ends:
            start = max([start, *(np.flatnonzero(stream[:place] == eod) + 1)])
        if start == place:  # nothing of its document predicts the token
            continue
        text = torch.from_numpy(stream[None, start : place + 1])
        with torch.no_grad():
            hidden = stage.hidden_states(Microbatch.of(text, torch.zeros(1, dtype=torch.int64)), None)
            losses.append(F.cross_entropy(stage.logits(hidden)[-1, :, :31], text[:, -1]).item())
    assert num_tokens == len(losses) == 29 - 4 * has_ends
    assert total / num_tokens == pytest.approx(np.mean(losses), rel=1e-12)
