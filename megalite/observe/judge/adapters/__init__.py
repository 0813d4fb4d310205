"""Adapters: a file for each package whose programs can be judged."""

import warnings

warnings.filterwarnings("ignore", module=r"megatron\.")  # that Apex and Transformer Engine are missing
