"""Building blocks of warp-specialized kernels for Hopper."""
