"""Prepare a corpus: filter and deduplicate raw text, shuffle it, and tokenize it into shards.

`plan` reads the settings and divides the input, `steps` has the filters, `fingerprints` the keys of documents
for deduplication, `exchange` the files between passes, `passes` the work of each pass, `report` its counts,
and `prepare` runs the passes.
"""
