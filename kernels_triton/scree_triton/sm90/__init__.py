"""Building blocks of warp-specialized kernels on Hopper."""
