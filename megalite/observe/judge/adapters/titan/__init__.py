"""The parts of the adapter of torchtitan, most of which differ by its version."""
