"""Command lines of users' scripts, unchanged."""

COURSE = """
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
      --num-layers 12 --hidden-size 768 --num-attention-heads 32 --seq-length 1024 --max-position-embeddings 1024
      --micro-batch-size 4 --global-batch-size 4 --train-iters 100 --vocab-file V.json --merge-file M.txt --init-method-std 0.006
      --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine
      --lr-decay-iters 800 --lr-warmup-fraction .01 --clip-grad 1.0 --weight-decay 1e-1 --exit-duration-in-mins 1190
      --log-interval 10 --save-interval 300 --eval-interval 1000 --eval-iters 10 --tensorboard-dir D --tensorboard-queue-size 1
      --log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard
      --profile-execution True --profile-name TP_PP --save CKPT --data-path PREFIX --data-impl mmap --split 949,50,1
      --distributed-backend nccl
"""  # noqa: E501

BLOOM = """
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 --num-layers 8 --hidden-size 14336
      --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --loss-scale 15 --save-interval 100
      --micro-batch-size 2 --global-batch-size 16 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --log-interval 1
      --eval-iters 40 --eval-interval 1000 --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
      --init-method-std 0.006 --bf16 --train-iters 100000 --data-impl mmap --checkpoint-activations --save C --load C
      --tensorboard-dir T --deepspeed --deepspeed_config ds_config.json --zero-stage 0 --deepspeed-activation-checkpointing
      --exit-interval 500 --optimizer adam --embed-layernorm --sync-tp-duplicated-parameters --seed 42
      --position-embedding-type alibi --tokenizer-type PretrainedFromHF --tokenizer-name-or-path NAME
      --abort-on-unmet-fused-kernel-constraints --data-path 0.033178301 ar_text_document 0.0112 ca_text_document
      --split 90,5,5 --adam-eps 1e-8 --pad-vocab-size-to 250880 --exit-duration-in-mins 5990
      --pp-partition-method 'type:transformer|embedding'
"""  # noqa: E501

BLOOM_176B_ADDS = """
    --train-samples 220_000_000 --lr-decay-samples 200_000_000 --lr-warmup-samples 183_105
      --rampup-batch-size 192 16 9_765_625 --kill-switch-path FILE --num-workers 2 --valid-num-workers 0
      --train-weighted-split-paths-path FILE --valid-weighted-split-paths-path FILE
"""

BLOOM_DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": 16,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 0},
    "bf16": {"enabled": True},
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}

GPT3_175B = """--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
  --max-position-embeddings 2048 --attention-backend auto --micro-batch-size 1 --global-batch-size 1536
  --step-batch-size-schedule 0:16 2.4B:320 12B:1536 --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9
  --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine
  --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000 --tensor-model-parallel-size 8
  --pipeline-model-parallel-size 16 --data-path D --vocab-file V --merge-file M --split 949,50,1
  --log-interval 100 --save-interval 10000 --eval-interval 1000 --save C --load C --eval-iters 10
  --tensorboard-dir T"""

LLAMA3_8B = """--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length
  8192 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000
  --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --normalization RMSNorm
  --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
  --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1 --global-batch-size 128
  --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015
  --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0
  --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16
  --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
  --exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
  --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather
  --tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel --mock-data
  --tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path C --tiktoken-pattern v2 --split
  "'99,1,0'" --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1
  --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start
  4 --profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60 --save C --load C
  --tensorboard-dir T"""

BERT_340M = """--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512
  --max-position-embeddings 512 --attention-backend auto --micro-batch-size 4 --global-batch-size 32
  --train-iters 1000000 --weight-decay 1e-2 --clip-grad 1.0 --fp16 --lr 0.0001 --lr-decay-iters 990000
  --lr-decay-style linear --min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0
  --tensor-model-parallel-size 8 --data-path D --vocab-file vocab.txt --split 949,50,1 --log-interval 100
  --save-interval 10000 --eval-interval 1000 --save C --load C --eval-iters 10 --tensorboard-dir T"""
