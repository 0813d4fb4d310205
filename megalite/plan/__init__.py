"""Plan a run without a cluster: memory, time, price, and the best layout.

A plan uses the same config as training, and the same lists of actions as the pipeline's executor. Only
`calibrate` and `autotune` import torch.
"""
