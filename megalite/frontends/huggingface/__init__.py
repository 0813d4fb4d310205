"""Models of transformers: settings and tensors, and ours; a file has the tables of related families."""
