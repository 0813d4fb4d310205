"""A trained model at work: text from prompts, and the loss of text."""
