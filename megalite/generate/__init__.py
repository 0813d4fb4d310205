"""Use a trained model: generate text from prompts, and compute the loss of text."""
