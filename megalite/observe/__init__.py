"""Record what runs: operators, modules, collectives and memory, and the work of a model's units."""
