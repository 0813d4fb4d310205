"""Read text into the microbatches of a training step.

Preprocessing: `preprocessing/` reads text, and `tokenizers/` encode it -> `indexed_dataset` (.bin and .idx).
Training: `corpus_sources` (which parts of which corpora) -> `gpt_dataset` (samples) -> `blend` ->
`build_datasets` -> `sampler`, `batch`.
"""
