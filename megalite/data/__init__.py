"""From text files to the microbatches of a training step.

Preprocessing: `documents` (reads text) -> `tokenizer` -> `indexed_writer` (.bin and .idx).
Training: `indexed` (reads them) -> `gpt_index`, `gpt` (samples) -> `blend` -> `build` -> `sampler`, `batch`.
"""
