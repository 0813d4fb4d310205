"""The parts of preprocessing.

`job` (what to do) -> `pieces` (the input cut up) -> `pool` of `encoder`s, each with a `shard` of its own ->
`ledger` (what is done, for a resumption) -> `join` (shards to .bin and .idx) -> `report`.
"""
