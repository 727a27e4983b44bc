"""The namespaces by name: ``import scree.xp.numpy as xp``; likewise ``torch``, ``jax``, ``mlx``, ``array_api_strict``."""
