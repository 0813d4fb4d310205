"""Train a model from a config.

`setup` prepares the process, `run_context` and `trainer` build what a run needs, and `loop` trains.
`train_step` is one iteration. All other work of a run is a callback (`callbacks/`). `telemetry/` writes its
metrics.
"""
