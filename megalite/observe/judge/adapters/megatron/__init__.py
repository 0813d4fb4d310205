"""Parts of the adapter of megatron-core."""
