"""Kernels made of a library's own primitives, registered like any other kernel."""
