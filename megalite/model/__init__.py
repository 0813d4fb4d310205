"""The decoder-only transformer: GPT, BLOOM and Llama are switches of one model."""
