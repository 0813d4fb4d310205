"""From a config to a trained model: step, loop, evaluation, and all that a run tells about itself.

Running: `prepare` -> `trainer`, `step`, `batches` -> `loop`, `stop`.
Telling: `metrics` (with `flops`, `memory`) and `timers` -> `writers` -> `log_line`, `metrics_file`,
`tensorboard`; `profiler` by itself.
"""
