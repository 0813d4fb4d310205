"""Flags of Megatron-LM and Megatron-DeepSpeed."""
