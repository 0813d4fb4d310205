"""Use of a trained model: text from prompts, and the loss of text."""
