"""Options of the model by what they configure, and the specs of its layers that follow from them."""
