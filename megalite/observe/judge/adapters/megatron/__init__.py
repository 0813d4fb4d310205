"""What the adapter of megatron-core is made of."""
