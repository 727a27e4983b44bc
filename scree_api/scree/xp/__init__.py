"""Array API namespaces by name: ``import scree.xp.numpy as xp``.

The modules are ``numpy``, ``torch``, ``jax``, ``mlx`` and ``array_api_strict``.
"""
