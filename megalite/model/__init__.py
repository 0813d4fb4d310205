"""The transformer: GPT, BLOOM and Llama are switches of one model, and BERT shares its layers."""
