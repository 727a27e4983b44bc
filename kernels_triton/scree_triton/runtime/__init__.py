"""Devices, launches, autograd and torch.compile."""
