"""The package of bridges: every name resolves, and foreign libraries are imported on first use."""

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

from scree import bridges

NEEDS = {"arrow": "pyarrow", "flash_attn": "torch", "varlen": "torch"}
NEEDS_NOTHING = ("dlpack", "huggingface", "lists", "serving", "tensorflow")
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
    "module", [m for m in bridges.NAMES if m in NEEDS_NOTHING or find_spec(NEEDS.get(m, m))]
)
def test_every_name_is_an_attribute(module: str) -> None:
    for name in bridges.NAMES[module]:
        assert getattr(bridges, name).__module__ == f"scree.bridges.{module}"
        assert name in dir(bridges)
    assert getattr(bridges, module) is import_module(f"scree.bridges.{module}")


def test_import_of_scree_loads_no_foreign_library() -> None:
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


#: Bridge -> the library that it needs, a wrong argument, and the message of the error.
WRONG_ARGUMENTS = {
    "from_lists": ("numpy", 5, "rows: expected a sequence of lists, got int"),
    "from_pandas": ("pandas", [[1]], "series: expected a pandas.Series, got list; see from_lists"),
    "from_ragged": ("ragged", [[1]], "array: expected a ragged.array, got list"),
    "from_awkward": ("awkward", {}, "array: expected rows of numbers, n \\* var \\* T, got dict"),
    "from_hf_flattened": ("numpy", [[1]], "batch: expected a mapping of names to arrays, got list"),
    **{
        name: (needs, [[1]], "(arr|pages): expected a ragged array, got list; see scree.pack")
        for name, needs in {
            "to_numpy": "numpy",
            "to_hf_padded": "numpy",
            "to_hf_flattened": "numpy",
            "to_lists": "numpy",
            "to_block_table": "numpy",
            "to_pandas": "pandas",
            "to_torch_nested": "torch",
            "to_arrow": "pyarrow",
            "to_awkward": "awkward",
            "to_ragged": "ragged",
        }.items()
    },
}


@pytest.mark.parametrize(
    "name", [name for name, (needs, *_) in WRONG_ARGUMENTS.items() if find_spec(needs)]
)
def test_wrong_type_raises_and_names_the_argument(name: str) -> None:
    _, argument, message = WRONG_ARGUMENTS[name]
    with pytest.raises(TypeError, match=message):
        getattr(bridges, name)(argument)


def test_unknown_name_raises() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'from_nowhere'"):
        _ = bridges.from_nowhere
