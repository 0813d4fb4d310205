"""A picture of a few iterations: what every rank did when, on one clock, and what share of it was waiting."""
