"""Modules with the names of FlashAttention's, for programs that import them by name."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from . import bert_padding, probabilities, raw, rotary, v2, v3, v4

#: Version of FlashAttention 2 whose functions `v2` has.
VERSION = "2.8.4"

#: Name of a module -> the module of scree with its functions, or None for a package without any.
MODULES: dict[str, ModuleType | None] = {
    "flash_attn": v2,
    "flash_attn.flash_attn_interface": v2,
    "flash_attn.bert_padding": bert_padding,
    "flash_attn.layers": None,
    "flash_attn.layers.rotary": rotary,
    "flash_attn.cute": v4,
    "flash_attn.cute.interface": v4,
    "flash_attn_interface": v3,
}
#: Name of a module -> names that it has beside the public functions.
OTHER_NAMES = {
    "flash_attn.flash_attn_interface": {
        **{name: getattr(raw, name) for name in raw.__all__},
        # Only FlashAttention's own tests import these.
        "_get_block_size_n": probabilities.block_size_n,
        "USE_TRITON_ROCM": False,
    }
}
PACKAGES = ("flash_attn", "flash_attn.layers", "flash_attn.cute")

_installed: dict[str, ModuleType] = {}


def install(*, force: bool = False) -> None:
    """Make the functions importable as `flash_attn` and `flash_attn_interface`.

    Later imports of these modules get the functions of scree: version 2 from `flash_attn`, version
    3 from `flash_attn_interface`, and version 4 from ``flash_attn.cute``. Modules that imported
    FlashAttention before keep it. A second call has no effect.

    Parameters
    ----------
    force
        Whether to hide FlashAttention if it is installed.

    Raises
    ------
    ImportError
        If FlashAttention is installed, without `force`.

    Examples
    --------
    >>> import sys, scree.bridges.flash_attn
    >>> scree.bridges.flash_attn.install(force=True)
    >>> from flash_attn import flash_attn_func
    >>> flash_attn_func.__module__
    'scree.bridges.flash_attn.v2'
    >>> for name in [name for name in sys.modules if name.startswith("flash_attn")]:
    ...     del sys.modules[name]  # undo it
    """
    for name in ("flash_attn", "flash_attn_interface"):
        if not force and _is_installed(name):
            raise ImportError(
                f"force: expected True to replace {name}, which is installed, got False; "
                "uninstall it or call install(force=True)"
            )
    if _installed and all(sys.modules.get(name) is x for name, x in _installed.items()):
        return
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("flash_attn", "flash_attn_interface"):
            del sys.modules[name]
    for name, source in MODULES.items():
        module = _make_module(name, source)
        _installed[name] = sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(_installed[parent], child, module)


def _is_installed(name: str) -> bool:
    if name in sys.modules:
        # find_spec would raise for a module without a specification.
        return sys.modules[name] is not _installed.get(name)
    return find_spec(name) is not None


def _make_module(name: str, source: ModuleType | None) -> ModuleType:
    module = ModuleType(name, None if source is None else source.__doc__)
    names = [] if source is None else [*source.__all__]
    module.__dict__.update({x: getattr(source, x) for x in names}, __all__=names)
    module.__dict__.update(OTHER_NAMES.get(name, {}))
    # find_spec, which programs use to look for the package, needs a specification.
    module.__spec__ = ModuleSpec(name, None, is_package=name in PACKAGES)
    if name in PACKAGES:
        module.__path__ = []
    if name == "flash_attn":
        module.__dict__["__version__"] = VERSION
    return module
