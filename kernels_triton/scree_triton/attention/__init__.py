"""Variable-length attention, forward and backward."""
