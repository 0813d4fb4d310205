"""Record what runs: operators, modules, collectives, memory and units; compare runs, and show them."""
