"""Turn text files into indexed datasets.

`preprocess_job` (what to do) -> `input_plan` (cuts the input into `pieces`) -> `pool` of `encoder`s, each of
which writes its own `shards` -> `preprocess` (records finished pieces, so that a killed run can resume, and
joins the shards to .bin and .idx) -> `preprocessing_report`.
"""
