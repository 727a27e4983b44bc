"""The groups of the reference: every public name is in exactly one group.

`reference_pages.py` builds the pages from these tables. `check` fails if a public name of scree, or
a function of the Array API standard, is missing or is listed twice.
"""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from inspect import cleandoc
from pathlib import Path

import scree
from scree import bridges, data, distributed
from scree.functions import EXTENSIONS, KINDS

PACKAGE = Path(scree.__file__).parent

#: Group -> its public names, without the prefix `scree.`.
GROUPS: dict[str, str] = {
    "The array": "Array at",
    "The namespace": "namespace Namespace xp functions functions.Kind",
    "Creation and conversion": """
        ragged pack unpack from_lengths from_offsets from_cu_seqlens from_segment_ids
        from_padded to_padded""",
    "Along each row": "softmax log_softmax logsumexp topk shift",
    "Layers": """
        attention layer_norm rms_norm rope rope_frequencies RopeScaling swiglu conv1d
        split dropout""",
    "Activations": "relu gelu silu erf",
    "Paged caches": "paged_attention append_paged merge_attention validate_pages PagePool",
    "Losses": "cross_entropy linear_cross_entropy",
    "Moving tokens and rows": "gather scatter scatter_add group",
    "Rows and positions": "segment_ids positions broadcast_rows same_layout align",
    "Batches": """
        data data.collate data.TokenBudgetSampler data.fit_cost data.split_balanced data.truncate
        data.chunk data.interleave data.Interleaved bucket""",
    "Several GPUs": "distributed distributed.shard distributed.unshard",
    "Files": "save load",
    "Bridges: array libraries": """
        bridges bridges.to_backend bridges.to_numpy bridges.to_torch bridges.to_jax bridges.to_mlx
        bridges.from_torch_nested bridges.to_torch_nested bridges.from_tensorflow
        bridges.to_tensorflow bridges.from_scipy bridges.to_scipy""",
    "Bridges: models": """
        bridges.from_hf_padded bridges.to_hf_padded bridges.from_hf_flattened
        bridges.to_hf_flattened bridges.transformers bridges.transformers.register
        bridges.transformers.register_continuous_batching
        bridges.varlen bridges.varlen.varlen_attn bridges.varlen.varlen_attn_out
        bridges.from_block_table bridges.to_block_table bridges.from_flashinfer
        bridges.to_flashinfer bridges.slot_mapping""",
    "Bridges: FlashAttention": """
        bridges.flash_attn bridges.flash_attn.flash_attn_func
        bridges.flash_attn.flash_attn_kvpacked_func bridges.flash_attn.flash_attn_qkvpacked_func
        bridges.flash_attn.flash_attn_varlen_func
        bridges.flash_attn.flash_attn_varlen_kvpacked_func
        bridges.flash_attn.flash_attn_varlen_qkvpacked_func
        bridges.flash_attn.flash_attn_with_kvcache bridges.flash_attn.unpad_input
        bridges.flash_attn.pad_input bridges.flash_attn.index_first_axis
        bridges.flash_attn.index_put_first_axis bridges.flash_attn.apply_rotary_emb
        bridges.flash_attn.install bridges.flash_attn.v3 bridges.flash_attn.v3.flash_attn_func
        bridges.flash_attn.v3.flash_attn_qkvpacked_func
        bridges.flash_attn.v3.flash_attn_varlen_func
        bridges.flash_attn.v3.flash_attn_with_kvcache bridges.flash_attn.v3.flash_attn_combine
        bridges.flash_attn.v3.get_scheduler_metadata bridges.flash_attn.v4
        bridges.flash_attn.v4.flash_attn_func bridges.flash_attn.v4.flash_attn_varlen_func""",
    "Bridges: columns and lists": """
        from_lists bridges.from_arrow bridges.to_arrow bridges.from_awkward bridges.to_awkward
        bridges.from_ragged bridges.to_ragged bridges.from_pandas bridges.to_pandas
        bridges.from_lists bridges.to_lists""",
    "Kernels": """
        register_kernel unregister_kernel explain explanation.Explanation layout.Layout
        layout.Tiles""",
}

#: Public module -> the page that describes it.
MODULES = {
    "ragged": "ragged.md",
    "xp": "namespace.md",
    "functions": "namespace.md",
    "data": "bridges.md",
    "distributed": "guides/multi-gpu.md",
    "bridges": "bridges.md",
    "bridges.transformers": "bridges.md",
    "bridges.flash_attn": "bridges.md",
    "bridges.flash_attn.v3": "bridges.md",
    "bridges.flash_attn.v4": "bridges.md",
    "bridges.varlen": "bridges.md",
}

#: Functions that only a module of `scree.bridges` offers.
IN_MODULES = (
    "bridges.transformers.register",
    "bridges.transformers.register_continuous_batching",
    "bridges.flash_attn.flash_attn_func",
    "bridges.flash_attn.flash_attn_kvpacked_func",
    "bridges.flash_attn.flash_attn_qkvpacked_func",
    "bridges.flash_attn.flash_attn_varlen_func",
    "bridges.flash_attn.flash_attn_varlen_kvpacked_func",
    "bridges.flash_attn.flash_attn_varlen_qkvpacked_func",
    "bridges.flash_attn.flash_attn_with_kvcache",
    "bridges.flash_attn.unpad_input",
    "bridges.flash_attn.pad_input",
    "bridges.flash_attn.index_first_axis",
    "bridges.flash_attn.index_put_first_axis",
    "bridges.flash_attn.apply_rotary_emb",
    "bridges.flash_attn.install",
    "bridges.flash_attn.v3",
    "bridges.flash_attn.v3.flash_attn_func",
    "bridges.flash_attn.v3.flash_attn_qkvpacked_func",
    "bridges.flash_attn.v3.flash_attn_varlen_func",
    "bridges.flash_attn.v3.flash_attn_with_kvcache",
    "bridges.flash_attn.v3.flash_attn_combine",
    "bridges.flash_attn.v3.get_scheduler_metadata",
    "bridges.flash_attn.v4",
    "bridges.flash_attn.v4.flash_attn_func",
    "bridges.flash_attn.v4.flash_attn_varlen_func",
    "bridges.varlen.varlen_attn",
    "bridges.varlen.varlen_attn_out",
)

#: Module of `bridges.flash_attn` -> the functions that the package imports from it.
FLASH_ATTN = {
    "bert_padding": "index_first_axis index_put_first_axis pad_input unpad_input",
    "installation": "install",
    "rotary": "apply_rotary_emb",
    "v2": """
        flash_attn_func flash_attn_kvpacked_func flash_attn_qkvpacked_func flash_attn_varlen_func
        flash_attn_varlen_kvpacked_func flash_attn_varlen_qkvpacked_func flash_attn_with_kvcache""",
}
MODULES_OF_FLASH_ATTN = {x: module for module, names in FLASH_ATTN.items() for x in names.split()}

#: Documented classes that are no attributes of `scree`.
DOCUMENTED = ("functions.Kind", "explanation.Explanation", "layout.Layout", "layout.Tiles")

#: Page of the standard -> its title and its functions, by the chapters of the standard.
CHAPTERS: dict[str, tuple[str, str]] = {
    "constants": ("Constants", "e inf nan newaxis pi"),
    "data-types": ("Data types", """
        bool complex64 complex128 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32
        uint64"""),
    "data-type-functions": (
        "Data type functions", "astype can_cast finfo iinfo isdtype result_type"),
    "creation": ("Creation functions", """
        arange asarray empty empty_like eye from_dlpack full full_like linspace meshgrid ones
        ones_like tril triu zeros zeros_like"""),
    "elementwise": ("Elementwise functions", """
        abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_invert
        bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor ceil clip conj copysign cos
        cosh divide equal exp expm1 floor floor_divide greater greater_equal hypot imag isfinite
        isinf isnan less less_equal log log10 log1p log2 logaddexp logical_and logical_not
        logical_or logical_xor maximum minimum multiply negative nextafter not_equal positive pow
        real reciprocal remainder round sign signbit sin sinh sqrt square subtract tan tanh
        trunc"""),
    "statistical": ("Statistical functions", """
        cumulative_prod cumulative_sum max mean min prod std sum var"""),
    "sorting": ("Sorting functions", "argsort sort"),
    "searching": ("Searching functions", """
        argmax argmin count_nonzero nonzero searchsorted where"""),
    "sets": ("Set functions", "isin unique_all unique_counts unique_inverse unique_values"),
    "utility": ("Utility functions", "all any diff"),
    "indexing": ("Indexing functions", "take take_along_axis"),
    "manipulation": ("Manipulation functions", """
        broadcast_arrays broadcast_shapes broadcast_to concat expand_dims flip moveaxis
        permute_dims repeat reshape roll squeeze stack tile unstack"""),
    "linear-algebra": ("Linear algebra functions", "matmul matrix_transpose tensordot vecdot"),
    "linalg": ("Extension: linear algebra", " ".join(f"linalg.{x}" for x in """
        cholesky cross det diagonal eig eigh eigvals eigvalsh inv matmul matrix_norm matrix_power
        matrix_rank matrix_transpose outer pinv qr slogdet solve svd svdvals tensordot trace vecdot
        vector_norm""".split())),
    "fft": ("Extension: Fourier transforms", " ".join(f"fft.{x}" for x in """
        fft fftfreq fftn fftshift hfft ifft ifftn ifftshift ihfft irfft irfftn rfft rfftfreq
        rfftn""".split())),
    "inspection": ("Inspection", "__array_api_version__ __array_namespace_info__"),
}  # fmt: skip


def group_of_names() -> dict[str, str]:
    """Return the group of every public name."""
    return {name: group for group, names in GROUPS.items() for name in names.split()}


def public_names() -> set[str]:
    """Return every public name, without the prefix `scree.`."""
    names = {*scree.__all__, *dir(scree), *IN_MODULES, *DOCUMENTED} - {"__version__"}
    names |= {f"data.{name}" for name in data.__all__}
    names |= {f"distributed.{name}" for name in distributed.__all__}
    return names | {f"bridges.{name}" for name in dir(bridges) if name in NAMES_OF_BRIDGES}


#: Conversions, and the modules that users import by name.
NAMES_OF_BRIDGES = {*bridges.__all__, "flash_attn", "transformers", "varlen"}


def names_of_standard() -> set[str]:
    """Return every name of the standard, the extensions with their prefix."""
    extensions = {f"{e}.{name}" for e, kinds in EXTENSIONS.items() for name in kinds}
    return {*KINDS} | extensions


def differences(listed: Iterable[str], public: set[str]) -> list[str]:
    """Return one message per public name that is not listed exactly once, and per foreign name."""
    counts = Counter(listed)
    messages = [f"{name} is in no group" for name in sorted(public - counts.keys())]
    messages += [f"{name} is not public" for name in sorted(counts.keys() - public)]
    return messages + [f"{name} is in {n} groups" for name, n in counts.items() if n > 1]


def check() -> None:
    """Raise if a public name or a function of the standard is not in exactly one group."""
    listed = [name for names in GROUPS.values() for name in names.split()]
    of_standard = [name for _, names in CHAPTERS.values() for name in names.split()]
    messages = differences(listed, public_names())
    if messages := messages + differences(of_standard, names_of_standard()):
        raise ValueError("docs/reference_groups.py: " + "; ".join(messages))


def true_path(name: str) -> str:
    """Return the module and the qualified name of a public name, without importing its library."""
    parent, _, short = name.rpartition(".")
    if parent == "bridges" and short in bridges.MODULES:
        return f"scree.bridges.{bridges.MODULES[short]}.{short}"
    if parent == "bridges.flash_attn" and short in MODULES_OF_FLASH_ATTN:
        return f"scree.{parent}.{MODULES_OF_FLASH_ATTN[short]}.{short}"
    if name in IN_MODULES or name in MODULES:
        return f"scree.{name}"
    value = scree
    for part in name.split("."):
        value = getattr(value, part)
    return f"{value.__module__}.{value.__qualname__}"


@cache
def pages() -> dict[str, str]:
    """Return the name that has the page, for every public name except modules.

    Several names of one function share a page: the page of the first name in `GROUPS`.
    """
    first: dict[str, str] = {}
    names = [name for name in group_of_names() if name not in MODULES]
    return {name: first.setdefault(true_path(name), name) for name in names}


@cache
def _module(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def definition(path: str) -> ast.AST:
    """Return the node of a module, class or function; reads the source without importing it."""
    file, parts = PACKAGE, path.split(".")[1:]
    while parts and ((file / parts[0]).is_dir() or (file / f"{parts[0]}.py").is_file()):
        file /= parts.pop(0)
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    node: ast.AST = _module(file)
    for part in parts:
        node = next(x for x in _definitions(node) if x.name == part)
    return node


def _definitions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield child


def docstring(path: str) -> str:
    """Return the docstring at a path, or an empty string."""
    node = definition(path)
    assert isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    return cleandoc(ast.get_docstring(node) or "")


def summary(path: str) -> str:
    """Return the first paragraph of the docstring at a path, on one line."""
    return " ".join(docstring(path).partition("\n\n")[0].split())


def parameters(path: str) -> set[str]:
    """Return the names of the parameters at a path."""
    return {x.arg for x in ast.walk(definition(path)) if isinstance(x, ast.arg)}
