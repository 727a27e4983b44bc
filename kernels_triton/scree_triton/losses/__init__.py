"""Cross-entropy, fused and plain."""
