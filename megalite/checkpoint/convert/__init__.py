"""Convert models of other programs (Hugging Face folders, Megatron's checkpoints) to and from megalite's."""
