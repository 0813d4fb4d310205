"""Techniques without a proof of their value yet: README.md has the rules, and a table of what is here.

Nothing else of megalite imports this package. An experiment is a program of its own, which passes its model,
dataset or callbacks to `megalite.pretrain`, as those in examples/ do.
"""
