"""Ladders: runs of one family of models at several sizes, and the law that their losses follow."""
