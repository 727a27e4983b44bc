"""The conformance suite: what scree promises, as a table of cases that any library or kernel provider can be run against."""
