"""Read text into the microbatches of a training step.

Preprocessing: `preprocessing/` reads text, and `tokenizers/` encode it -> `indexed_dataset` (.bin and .idx).
Training: `corpus_sources` (which parts of which corpora) -> `gpt_dataset` (samples) -> `blend` ->
`build_datasets` -> `batch_loader` -> `microbatch`.
Fine-tuning: `preprocessing/conversations` marks answers in a `loss_mask`, and `packing` places whole
conversations into the samples of `packed_dataset`.
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec(f"{__name__}._index_builder") is None:
    _package = Path(__file__).parents[1]
    # Exit instead of raising, so that each rank prints one line instead of a traceback.
    sys.exit(
        f"error: {_package} is not compiled: run `pip install {_package.parent}`, or start in another folder "
        "to use an installed megalite"
    )
