"""Record what a part of a model does: operators, messages and memory of one microbatch, on meta tensors."""
