"""Values that pass between the data, the model and the loss."""
