"""Other programs' models: Hugging Face folders and Megatron's checkpoints, to and from megalite's."""
