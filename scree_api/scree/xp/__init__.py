"""The namespaces by name: ``import scree.xp.numpy as xp`` is ``scree.namespace`` of a NumPy array; likewise
``torch``, ``jax``, ``mlx`` and ``array_api_strict``.
"""
