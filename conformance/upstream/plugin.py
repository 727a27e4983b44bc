"""A pytest plugin that runs the tests of another project through scree.

``SCREE_UPSTREAM`` names the suite and ``SCREE_UPSTREAM_SOURCE`` the checkout. Without a CUDA device
the tests run on the CPU: they name the device "cuda", which a mode of PyTorch replaces.
``SCREE_UPSTREAM_DRAW`` is the number of cases that are drawn per test, 0 for all of them, and
``SCREE_UPSTREAM_MAX`` the largest number in the name of a case, 0 for any.
"""

import os
import random
import re
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

SUITE = os.environ["SCREE_UPSTREAM"]
SOURCE = Path(os.environ["SCREE_UPSTREAM_SOURCE"])
DRAW = int(os.environ.get("SCREE_UPSTREAM_DRAW", "0"))
SEED = int(os.environ.get("SCREE_UPSTREAM_SEED", "0"))
MAX_NUMBER = int(os.environ.get("SCREE_UPSTREAM_MAX", "0"))
HAS_CUDA = torch.cuda.is_available()


class _OnCpu(TorchFunctionMode):
    """Replace the device "cuda" by "cpu" in the arguments of PyTorch's functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = {name: _as_cpu(x) for name, x in (kwargs or {}).items()}
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*map(_as_cpu, args), **kwargs)


def _as_cpu(x: Any) -> Any:
    is_cuda = (
        x == "cuda" if isinstance(x, str) else isinstance(x, torch.device) and x.type == "cuda"
    )
    return "cpu" if is_cuda else x


def _run_on_cpu() -> None:
    # What the tests ask about a GPU.
    properties = types.SimpleNamespace(multi_processor_count=2, total_memory=1 << 34, name="none")
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.is_bf16_supported = lambda *_: True
    torch.cuda.mem_get_info = lambda *_: (1 << 34, 1 << 34)
    for name in ("synchronize", "empty_cache", "manual_seed_all"):
        setattr(torch.cuda, name, lambda *_: None)
    if SUITE.startswith("torch"):
        from torch.testing._internal import common_cuda

        common_cuda.PLATFORM_SUPPORTS_FLASH_ATTENTION = True
    _OnCpu().__enter__()


def pytest_configure(config: pytest.Config) -> None:
    """Replace the functions of the other project before its tests are imported."""
    sys.path.insert(0, str(Path(__file__).parent))
    if SUITE == "flash_attn":
        from scree.bridges import flash_attn

        flash_attn.install(force=True)
    elif SUITE in ("liger", "quack"):
        import_module(f"{SUITE}_functions").install(SOURCE)
    elif SUITE == "torch_switch":
        import_module("scree.bridges.torch")
        torch.nn.attention.activate_flash_attention_impl("scree")
    if not HAS_CUDA and SUITE != "transformers":  # its tests ask for the device
        _run_on_cpu()


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: Any) -> None:
    """Draw cases of a test. Items of all cases take minutes: FlashAttention has 500,000."""
    calls = metafunc._calls
    if MAX_NUMBER:
        numbers = ([int(x) for x in re.findall(r"\d+", call.id)] for call in calls)
        calls = [x for x, n in zip(calls, numbers, strict=True) if max(n, default=0) <= MAX_NUMBER]
        calls = calls or metafunc._calls[:1]
    if DRAW and len(calls) > DRAW:
        chosen = random.Random(f"{SEED} {metafunc.definition.name}").sample(range(len(calls)), DRAW)
        calls = [calls[i] for i in sorted(chosen)]
    metafunc._calls[:] = calls


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove tests of internals, and draw tests that are methods, which PyTorch generates."""
    from run import EXCLUDED, EXCLUDED_ON_CPU

    patterns = [*EXCLUDED.get(SUITE, {})]
    if not HAS_CUDA:
        patterns += EXCLUDED_ON_CPU.get(SUITE, {})

    def is_excluded(item: pytest.Item) -> bool:
        names = item.name, item.name.partition("[")[0]
        return any(re.fullmatch(pattern, name) for pattern in patterns for name in names)

    kept = [x for x in items if not is_excluded(x)]
    if DRAW and SUITE.startswith("torch"):
        chosen = random.Random(SEED).sample(range(len(kept)), min(len(kept), 4 * DRAW))
        kept = [kept[i] for i in sorted(chosen)]
    config.hook.pytest_deselected(items=[x for x in items if x not in kept])
    items[:] = kept
