"""Operations, kernels and the call cache."""
