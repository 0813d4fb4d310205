"""What a run says of itself: figures of an interval, and all the places they are written to."""
