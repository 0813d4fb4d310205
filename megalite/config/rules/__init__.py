"""Rules between fields, one file per topic: functions from a config to its problems."""
