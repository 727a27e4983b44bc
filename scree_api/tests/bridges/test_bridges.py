"""The package of bridges: every name is found, and none of the foreign libraries is imported before it is asked for."""

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

from scree import bridges

NEEDS = {"arrow": "pyarrow", "flash_attn": "torch", "varlen": "torch"}
LIGHT = ("dlpack", "huggingface", "lists", "serving", "tensorflow")
FOREIGN = ("torch", "jax", "mlx", "pyarrow", "awkward", "scipy", "pandas", "transformers", "tensorflow", "safetensors")


@pytest.mark.parametrize("module", [m for m in bridges.NAMES if m in LIGHT or find_spec(NEEDS.get(m, m))])
def test_every_name_is_found(module: str) -> None:
    for name in bridges.NAMES[module]:
        assert getattr(bridges, name).__module__ == f"scree.bridges.{module}"
        assert name in dir(bridges)
    assert getattr(bridges, module) is import_module(f"scree.bridges.{module}")


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    code = f"import sys, scree; dir(scree.bridges); print([m for m in {FOREIGN} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    code = "import sys, scree; scree.bridges.from_hf_padded; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_a_name_that_is_not_there_raises() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'from_nowhere'"):
        _ = bridges.from_nowhere
