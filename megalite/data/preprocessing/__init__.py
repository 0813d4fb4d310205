"""Turn text files into indexed datasets.

`input_plan` (describes a job, and cuts its input into `pieces`) -> `pool` of `encoder`s, each of which writes
its own `shards` -> `preprocess` (records finished pieces, so that a killed run can resume, and joins the
shards to .bin and .idx) -> `preprocessing_report`.
"""
