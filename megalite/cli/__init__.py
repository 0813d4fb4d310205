"""The commands of megalite: one module each, with a `main` that takes the arguments."""
