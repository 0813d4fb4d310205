"""Accept the flags of Megatron-LM and Megatron-DeepSpeed, and the configuration file of DeepSpeed."""
