#!/usr/bin/env bash
# Train a small GPT on 4 ranks, starting from a fresh clone: install, tokenize the corpus of this repository, train with
# tensor-parallel and pipeline-parallel size 2, save, resume, and generate a line of text.
# All output is in .venv and runs/quickstart.
set -euo pipefail
cd "$(dirname "$0")/.."

run=runs/quickstart
say() { printf '\n== %s\n' "$*"; }

scripts/install.sh
rm -rf "$run"
mkdir -p "$run"

say "Tokenizing the corpus"
.venv/bin/python tools/preprocess_data.py --input scripts/corpus/bible.jsonl.gz --output-prefix "$run/corpus" \
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model scripts/corpus/tokenizer.json --append-eod

train() {
  OMP_NUM_THREADS=1 .venv/bin/torchrun --nproc-per-node 4 pretrain_gpt.py --config scripts/examples/quickstart.yaml --tp 2 --pp 2 \
    --data-path "$run/corpus_text_document" --save "$run/checkpoints" --load "$run/checkpoints" \
    --tensorboard-dir "$run/tensorboard" --metrics-file "$run/metrics.jsonl" "$@"
}

say "Training on 4 ranks (tensor parallel 2, pipeline parallel 2) to iteration 200"
train --exit-interval 200

say "Resuming from the checkpoint to iteration 300"
train

say "Generating text on one rank"
OMP_NUM_THREADS=1 .venv/bin/python tools/generate.py --load "$run/checkpoints" --prompt "And God said" \
  --temperature 0.7 --top-p 0.9 --max-new-tokens 40 | tee "$run/text.txt"

say "Done. Losses: $run/metrics.jsonl. Curves: .venv/bin/tensorboard --logdir $run/tensorboard
   Report: .venv/bin/python tools/report.py $run. Next, your own text: docs/quickstart.md"
# TensorBoard sorts its cards by name; this address pins those of the loss above them (docs/observe.md).
echo "   The loss first: http://localhost:6006/?pinnedCards=%5B%7B%22plugin%22%3A%22scalars%22%2C%22tag%22%3A%22lm%20loss%22%7D%2C%7B%22plugin%22%3A%22scalars%22%2C%22tag%22%3A%22lm%20loss%20validation%22%7D%5D"
