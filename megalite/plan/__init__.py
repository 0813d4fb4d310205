"""Plan a run without a cluster: memory, time, price, and the best layout.

A plan uses the same config as training, and the same lists of actions as the pipeline's executor. Only
modules that measure or run something import torch: `calibrate`, `measure`, and `rank_plan`, which plans a run
as it starts.
"""
