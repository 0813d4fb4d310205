"""Run the planner's fastest layouts for a few iterations, and compare them."""
