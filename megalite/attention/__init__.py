"""The transformer: GPT, BLOOM and Llama are settings of one model, and BERT shares its layers."""
