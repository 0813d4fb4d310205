"""Read and write multi-token prediction as DeepSeek-V3 and GLM-4.5 have it in their files.

Module k of a model with L layers has the names of layer L + k, k from 0; `MTP_PARTS` in `family.py` lists the
tensors besides the layer's. Files may repeat the word embedding and the output weight there, which the
modules share (`copied_names`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.config import ModelConfig

COUNT, ITS_OTHER_NAME = "num_nextn_predict_layers", "num_mtp_layers"
"""Their name for the number of modules in files, and in transformers' configs."""


def read_mtp(hf: HFSettings) -> dict[str, Any]:
    """Return our field for the number of modules."""
    counts = hf.get(COUNT), hf.get(ITS_OTHER_NAME)
    return {"mtp_num_layers": counts[0] or counts[1] or 0}


def write_mtp(config: ModelConfig) -> dict[str, Any]:
    """Return their setting for the number of modules, if there are any."""
    return {COUNT: config.mtp_num_layers} if config.mtp_num_layers else {}


def copied_names(config: ModelConfig) -> Iterator[str]:
    """Yield the names of the copies of shared weights."""
    for number in range(config.num_layers, config.num_layers + config.mtp_num_layers):
        for name in ("embed_tokens", "shared_head.head"):
            yield f"model.layers.{number}.{name}.weight"
