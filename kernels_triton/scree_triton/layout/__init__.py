"""Movement of tokens and rows: padding, gather, scatter, concat."""
