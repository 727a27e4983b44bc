"""The conformance suite: cases of scree's behaviour for any library or kernel provider."""
