"""Device mesh, process groups, collectives, store barriers, network setup, and local ranks for tests."""
