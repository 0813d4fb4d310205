"""Rules between fields, one file a concern; each is a function of the config to its problems."""
