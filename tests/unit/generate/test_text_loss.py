"""Every token of a stream is counted once, with at least the context that the stride allows."""

import numpy as np
import pytest

from megalite.generate.text_loss import windows


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
