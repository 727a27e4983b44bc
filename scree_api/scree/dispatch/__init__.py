"""Definition of operations, registration of kernels, and the dispatch of calls."""
