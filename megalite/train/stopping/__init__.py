"""Why a run ends before its last iteration, and what a scheduler is told."""
