"""The programs of megalite: one module for each command, with a `main` that takes its arguments."""
