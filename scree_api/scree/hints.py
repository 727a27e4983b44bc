"""The messages for attributes that arrays and namespaces do not have: what to write instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

#: Names in NumPy, PyTorch or JAX -> the expression that does it here.
ALTERNATIVES = {
    "T": "arr.mT or xp.permute_dims",
    "absolute": "xp.abs",
    "amax": "xp.max",
    "amin": "xp.min",
    "arange": "xp.arange of the dense library",
    "arccos": "xp.acos",
    "arcsin": "xp.asin",
    "arctan": "xp.atan",
    "arctan2": "xp.atan2",
    "array": "scree.from_lists or scree.pack",
    "bmm": "xp.matmul",
    "cat": "xp.concat",
    "causal_conv1d": "xp.ragged.conv1d",
    "clamp": "xp.clip",
    "concatenate": "xp.concat",
    "cumprod": "xp.cumulative_prod",
    "cumsum": "xp.cumulative_sum",
    "cpu": 'arr.to_device("cpu")',
    "cuda": 'arr.to_device("cuda")',
    "dim": "arr.ndim",
    "dot": "xp.vecdot or xp.matmul",
    "embedding": "xp.take(table, arr, axis=0)",
    "gt": "arr > other",
    "invert": "xp.bitwise_invert",
    "item": "xp.sum(arr) or another reduction, which gives a dense array",
    "len": "arr.lengths",
    "lt": "arr < other",
    "masked_fill": "xp.where(mask, value, arr)",
    "mm": "xp.matmul",
    "norm": "xp.linalg.vector_norm",
    "numel": "arr.size",
    "numpy": "arr.to_numpy()",
    "position_ids": "xp.ragged.positions",
    "power": "xp.pow",
    "repeat_interleave": "xp.repeat, or xp.ragged.broadcast_rows for one entry per row",
    "scaled_dot_product_attention": "xp.ragged.attention",
    "swapaxes": "xp.moveaxis",
    "swish": "xp.ragged.silu",
    "to_list": "arr.tolist()",
    "transpose": "xp.permute_dims or arr.mT",
    "true_divide": "xp.divide",
    "unsqueeze": "xp.expand_dims",
    "view": "xp.reshape",
}


def missing_from_array(arr: Any, name: str, xp: Any) -> str:
    """Return the message for an attribute that `arr` does not have."""
    message = f"a ragged array has no attribute {name!r}"
    if name.startswith("_"):
        return message
    if name in ALTERNATIVES:
        advice = f"use {ALTERNATIVES[name]}"
    elif name in xp.__all__:
        advice = f"use xp.{name}(arr, ...)"
    elif name in xp.ragged.__all__:
        advice = f"use xp.ragged.{name}(arr, ...)"
    elif hasattr(arr.values, name):
        advice = f"its values have it: arr.values.{name}, and arr.with_values(...) for the result"
    else:
        return message + _similar(name, (n for n in dir(arr) if n[0] != "_"), "arr.")
    needs_xp = "xp." in advice
    return f"{message}: {advice}" + (", with xp = scree.namespace(arr)" if needs_xp else "")


def missing_from_namespace(name: str, names: Iterable[str], operations: Iterable[str]) -> str:
    """Return the message for a function that a namespace does not have."""
    message = f"scree's namespace has no attribute {name!r}"
    if name.startswith("_"):
        return message
    if name in operations:
        return f"{message}: use xp.ragged.{name}"
    if name in ALTERNATIVES:
        return f"{message}: use {ALTERNATIVES[name]}"
    return message + (_similar(name, names, "xp.") or _similar(name, operations, "xp.ragged."))


def missing_from_operations(name: str, names: Iterable[str]) -> str:
    """Return the message for a function that `xp.ragged` does not have."""
    message = f"xp.ragged has no attribute {name!r}"
    return message if name.startswith("_") else message + _similar(name, names, "xp.ragged.")


def _similar(name: str, names: Iterable[str], prefix: str) -> str:
    from difflib import get_close_matches  # few programs need it

    matches = get_close_matches(name, list(names), n=1)
    return f"; did you mean {prefix}{matches[0]}?" if matches else ""
