"""Plan and measure how a run scales over nodes."""
