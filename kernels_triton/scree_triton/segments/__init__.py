"""Reductions, scans, softmax and argmax along rows."""
