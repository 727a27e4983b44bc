"""vLLM's Triton attention, imported from a checkout without the rest of vLLM.

The environment variable VLLM_CHECKOUT names the checkout for `scree-bench decode`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

#: The module that has `unified_attention`.
MODULE = "vllm.v1.attention.ops.triton_unified_attention"


class _QuantMode(IntEnum):
    """The modes of quantization that the module names."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4
    INT2_PER_TOKEN_HEAD = 5


def load(checkout: Path) -> None:
    """Import `MODULE` from a checkout of vLLM, whose other modules are replaced while it is imported.

    Importing vLLM itself needs its compiled extension and all of its dependencies.

    Raises
    ------
    ImportError
        If the checkout has no such module, or it imports a module that has no replacement here.
    """
    if MODULE not in sys.modules:
        with _replacements(checkout):
            module = import_module(MODULE)
        sys.modules[MODULE] = module


@contextmanager
def _replacements(checkout: Path) -> Iterator[None]:
    import torch
    import triton
    import triton.language as tl

    def is_cuda() -> bool:
        return True

    platform = SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn, is_cuda=is_cuda)
    contents: dict[str, dict[str, Any]] = {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": _QuantMode},
    }
    replaced = {name: x for name, x in sys.modules.items() if name.split(".")[0] == "vllm"}
    try:
        for name in replaced:
            del sys.modules[name]
        # Packages without their own `__init__`, which imports other parts.
        for name in (MODULE[:end] for end, x in enumerate(MODULE) if x == "."):
            package = sys.modules[name] = ModuleType(name)
            package.__path__ = [str(checkout.joinpath(*name.split(".")))]
        for name, values in contents.items():
            module = sys.modules[name] = ModuleType(name)
            vars(module).update(values)
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            del sys.modules[name]
        sys.modules.update(replaced)
