"""Measure a run and write its metrics to the log, files and dashboards."""
