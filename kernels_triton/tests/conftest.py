"""Without a GPU the kernels run in Triton's interpreter: here, and in no other test of the same process."""

import importlib
import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import scree
import scree_triton
from scree.dispatch import registry

SWITCH = "TRITON_INTERPRET"


def gpu() -> bool:
    """Whether there is a device."""
    import torch

    return torch.cuda.is_available()


def patch_language_once() -> None:
    """Make a launch in Triton's interpreter patch `triton.language` once, not once per function call.

    The interpreter replaces every built-in function when a kernel starts, and again at every call of
    a device function. These later replacements find nothing to replace, and take half of the run time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    used: dict[Any, set[str]] = {}
    patched: set[str] = set()

    class Scope(interpreter._LangPatchScope):
        """Patches of a launch, which end with the launch."""

        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch_missing(function: Any) -> Any:
        if function not in used:
            values = {*map(id, function.__globals__.values())}
            used[function] = {m.__name__ for m in (tl, tl.core) if id(m) in values}
        if patched and used[function] <= patched:
            return None  # the call of a device function, which takes no scope
        scope = Scope()
        scope._changes = patch(function)._changes
        patched.update(used[function])
        return scope

    interpreter._patch_lang = patch_missing


def skip_discarded_work() -> None:
    """Leave out work of Triton's interpreter that has no result; it takes half of the run time.

    Without debug mode, the interpreter computes whether a sum of integers overflows and discards the
    answer. For each type of NumPy that it looks up, it builds the table of all types.
    """
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    look_up, dtypes = interpreter._get_np_dtype, {}

    def look_up_once(dtype: Any) -> np.dtype:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = look_up(dtype)
        return dtypes[name]

    interpreter._get_np_dtype = look_up_once


# A kernel is compiled or interpreted depending on the switch at the time of its import. No test module
# sets the switch: a later module whose import loads a library would register the kernels for all tests.
if find_spec("triton") and not gpu():
    os.environ[SWITCH] = "1"
    patch_language_once()
    skip_discarded_work()
    for module in {entry.module for entry in scree_triton.KERNELS.values()}:
        importlib.import_module(f"scree_triton.{module}")
    del os.environ[SWITCH]


@pytest.fixture(autouse=True, scope="module")
def kernels():
    """Register the kernels for the tests of a module; no entry point does it if scree is not installed."""
    import torch

    # Before the switch: otherwise the entry point registers the kernels for all later tests too.
    scree.namespace(torch.zeros(1))
    interpreted = not gpu()
    if interpreted:
        os.environ[SWITCH] = "1"
    with registry.isolated():
        scree_triton.register()
        yield
    if interpreted:
        del os.environ[SWITCH]


@pytest.fixture
def isolated_registry():
    """Undo what the test registers and unregisters."""
    with registry.isolated():
        yield
