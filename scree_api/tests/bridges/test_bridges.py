"""The package of bridges: every name is found, and none of the foreign libraries is imported before it is asked for."""

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

from scree import bridges

NEEDS = {"arrow": "pyarrow", "flash_attn": "torch", "varlen": "torch"}
LIGHT = ("dlpack", "huggingface", "lists", "serving", "tensorflow")
FOREIGN = (
    "torch",
    "jax",
    "mlx",
    "pyarrow",
    "awkward",
    "scipy",
    "pandas",
    "transformers",
    "tensorflow",
    "safetensors",
)


@pytest.mark.parametrize(
    "module", [m for m in bridges.NAMES if m in LIGHT or find_spec(NEEDS.get(m, m))]
)
def test_every_name_is_found(module: str) -> None:
    for name in bridges.NAMES[module]:
        assert getattr(bridges, name).__module__ == f"scree.bridges.{module}"
        assert name in dir(bridges)
    assert getattr(bridges, module) is import_module(f"scree.bridges.{module}")


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    code = (
        f"import sys, scree; dir(scree.bridges); print([m for m in {FOREIGN} if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
    code = "import sys, scree; scree.bridges.from_hf_padded; print('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "False"
    )


#: Bridge -> what it needs, what it is given, and what it says.
STRANGERS = {
    "from_lists": ("numpy", 5, "rows: expected a sequence of lists, got int"),
    "from_pandas": ("pandas", [[1]], "series: expected a pandas.Series, got list; see from_lists"),
    "from_ragged": ("ragged", [[1]], "array: expected a ragged.array, got list"),
    "from_awkward": ("awkward", {}, "array: expected rows of numbers, n \\* var \\* T, got dict"),
    "from_hf_flattened": ("numpy", [[1]], "batch: expected a mapping of names to arrays, got list"),
    **{name: (needs, [[1]], "(arr|pages): expected a ragged array, got list; see scree.pack") for name, needs in {
        "to_numpy": "numpy", "to_hf_padded": "numpy", "to_hf_flattened": "numpy", "to_lists": "numpy", "to_block_table": "numpy",
        "to_pandas": "pandas", "to_torch_nested": "torch", "to_arrow": "pyarrow", "to_awkward": "awkward", "to_ragged": "ragged",
    }.items()},
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [name for name, (needs, *_) in STRANGERS.items() if find_spec(needs)]
)
def test_what_is_no_such_thing_is_named(name: str) -> None:
    _, stranger, words = STRANGERS[name]
    with pytest.raises(TypeError, match=words):
        getattr(bridges, name)(stranger)


def test_a_name_that_is_not_there_raises() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'from_nowhere'"):
        _ = bridges.from_nowhere
