"""The arrays and calls of `scree-bench decode`, against a float64 loop and stand-ins of peers."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from scree_bench import caches, pages, vllm_checkout
from scree_bench.caches import Batch, make_cache
from scree_bench.commands import decode
from scree_bench.libraries import load
from scree_bench.results import Result, Row

LENGTHS = (5, 1, 12, 8)


def cache_of(library="numpy", **options):
    sizes = {"page_size": 4, "heads": 4, "kv_heads": 2, "dim": 8, "seed": 3}
    return make_cache(load(library), Batch("case", LENGTHS, **(sizes | options)), "float32")


def attend(q, k, v):
    """Attention of the last tokens of a row, one head and one query at a time."""
    out, first = np.zeros(q.shape), len(k) - len(q)
    for i in range(q.shape[0]):
        for head in range(q.shape[1]):
            keys, values = (x[: first + i + 1, head * k.shape[1] // q.shape[1]] for x in (k, v))
            weights = np.exp(keys.astype(float) @ q[i, head] / q.shape[2] ** 0.5)
            out[i, head] = weights @ values / weights.sum()
    return out


def row_of(cache, i):
    """The keys and values of a row, token by token."""
    size, start = cache.batch.page_size, int(cache.batch.page_counts[:i].sum())
    slots = [(cache.pages[start + t // size], t % size) for t in range(cache.batch.lengths[i])]
    return (
        np.asarray([np.asarray(x[slot]) for slot in slots]) for x in (cache.k_pages, cache.v_pages)
    )


@pytest.mark.parametrize("queries", [(), (3, 1, 5, 8)])
def test_reference_of_a_batch_is_the_loop_over_heads(queries):
    cache = cache_of(queries=queries)
    parts = np.split(cache.q.values, np.cumsum(cache.batch.query_counts)[:-1])
    expected = np.concatenate([attend(q, *row_of(cache, i)) for i, q in enumerate(parts)])
    np.testing.assert_allclose(caches.reference(cache), expected, rtol=1e-12)


@pytest.mark.parametrize("make", [caches.scree_paged, caches.scree_contiguous, caches.padded_sdpa])
@pytest.mark.parametrize(
    "library", ["numpy", *(pytest.param(x, marks=pytest.mark.needs(x)) for x in ("torch", "jax"))]
)
def test_attention_of_every_contender_equals_the_reference(make, library):
    cache = cache_of(library)
    expected = caches.reference(cache)
    assert caches.relative_error(cache, make(cache)(), expected) < 1e-6
    # The comparison notices one wrong number.
    wrong = np.array(cache.lib.arrays.read(make(cache)()))
    wrong[-1] = 7
    wrong = cache.lib.make(wrong)
    assert caches.relative_error(cache, wrong, expected) > 1e-2


def test_select_and_share_keep_the_rows_that_they_name():
    cache = cache_of(queries=(1, 1, 3, 1))
    part = cache.select(slice(1, 3))
    assert part.batch.lengths == (1, 12) and part.batch.query_counts == (1, 3)
    for i in range(2):
        for expected, rows in zip(row_of(cache, i + 1), row_of(part, i), strict=True):
            np.testing.assert_array_equal(expected, rows)
    np.testing.assert_array_equal(part.q.values, cache.q.values[1:5])
    shared = make_cache(load("numpy"), Batch("case", (9, 10), 4, (), 2, 2, 8), "float32").share(2)
    assert shared.block_table[0, :2].tolist() == shared.block_table[1, :2].tolist()
    assert shared.block_table[0, 2] != shared.block_table[1, 2]


@pytest.mark.parametrize("make", [caches.scree_append, caches.indexed_append])
def test_append_writes_the_last_token_of_each_row(make):
    cache = cache_of()
    before = cache.k_pages.copy()
    make(cache)()
    k, v = caches.new_tokens(cache)
    for i, length in enumerate(LENGTHS):
        keys, values = row_of(cache, i)
        np.testing.assert_array_equal(keys[-1], k.values[i])
        np.testing.assert_array_equal(values[-1], v.values[i])
        assert len(keys) == length
    assert (cache.k_pages != before).any(axis=(2, 3)).sum() == len(LENGTHS)


@pytest.mark.needs("jax")
def test_append_to_donated_caches_writes_what_append_in_place_writes():
    expected, cache = cache_of(), cache_of("jax")
    caches.scree_append(expected)()
    append = caches.donated_append(cache)
    append()
    for got, wanted in zip(append(), (expected.k_pages, expected.v_pages), strict=True):
        np.testing.assert_array_equal(got, wanted)


class Wrapper:
    """FlashInfer's wrapper, in NumPy and by the meaning of its arguments."""

    def __init__(self, workspace, layout, use_tensor_cores):
        assert layout == "NHD" and use_tensor_cores

    def plan(self, indptr, pages, last, heads, kv_heads, dim, page_size, **dtypes):
        self.table = [np.asarray(x) for x in (indptr, pages, last)]
        assert (heads, kv_heads, dim, page_size) == (4, 2, 8, 4) and len(dtypes) == 2

    def run(self, q, pages):
        indptr, numbers, last = self.table
        outs = []
        for i in range(len(last)):
            used = numbers[indptr[i] : indptr[i + 1]]
            length = (len(used) - 1) * 4 + last[i]
            k, v = (np.asarray(x)[used].reshape(-1, 2, 8)[:length] for x in pages)
            outs.append(attend(np.asarray(q)[i : i + 1], k, v))
        return np.concatenate(outs)


def with_kvcache(q, k, v, cache_seqlens, causal):
    """`flash_attn_with_kvcache` in NumPy."""
    rows = zip(*(np.asarray(x) for x in (q, k, v, cache_seqlens)), strict=True)
    return np.stack([attend(q, k[:n], v[:n]) for q, k, v, n in rows])


def varlen(q, k, v, cu_seqlens_q, max_seqlen_q, seqused_k, page_table, causal):
    """`flash_attn_varlen_func` with a block table in NumPy, which returns a log-sum-exp too."""
    assert max_seqlen_q == 1 and np.asarray(cu_seqlens_q).tolist() == [0, 1, 2, 3, 4]
    table = np.asarray(page_table)
    k, v = (np.asarray(x)[table].reshape(len(table), -1, 2, 8) for x in (k, v))
    return with_kvcache(np.asarray(q)[:, None], k, v, seqused_k, causal), None


def unified(
    q, k, v, out, *, cu_seqlens_q, seqused_k, block_table, softmax_scale, causal, **options
):
    """VLLM's `unified_attention` in NumPy, which writes to `out`."""
    assert causal and softmax_scale == 8**-0.5
    assert options["softmax_segm_output"].shape[0] == options["seq_threshold_3D"]
    result, _ = varlen(
        q, k, v, cu_seqlens_q, options["max_seqlen_q"], seqused_k, block_table, causal
    )
    out.copy_(out.new_tensor(result[:, 0]))


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", list(decode.PEERS))
def test_peer_gets_the_page_table_in_its_form(name, monkeypatch):
    module, make = decode.PEERS[name]
    stand_in = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Wrapper,
        flash_attn_with_kvcache=with_kvcache,
        flash_attn_varlen_func=varlen,
        unified_attention=unified,
    )
    monkeypatch.setitem(sys.modules, module, stand_in)
    monkeypatch.setattr(caches.FlashInfer, "_workspace", None)
    cache = cache_of("torch")
    out = cache.lib.make(np.asarray(make(cache)()), "float64")
    assert caches.relative_error(cache, out, caches.reference(cache)) < 1e-6


@pytest.mark.needs("torch", "triton")
def test_loads_only_adds_up_the_words_of_all_pages():
    code = """
import numpy as np
from scree_bench import caches
from scree_bench.libraries import load

sizes = {"page_size": 4, "heads": 4, "kv_heads": 2, "dim": 8, "seed": 3}
cache = caches.make_cache(load("torch"), caches.Batch("case", (5, 1, 12, 8), **sizes), "float32")
words = [np.asarray(x)[cache.pages].view(np.int32) for x in (cache.k_pages, cache.v_pages)]
sums = caches.loads_only(cache)().numpy()
assert sums.sum(dtype=np.int32) == np.sum(words, dtype=np.int32) and sums.shape == (4, 64)
"""
    # Triton reads the variable when it is imported.
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)


@pytest.mark.parametrize(
    ("device", "library", "names"),
    [("cuda", "torch", ["loads only"]), ("cuda", "jax", []), ("cpu", "torch", [])],
)
def test_loads_only_is_a_contender_of_pytorch_on_cuda(device, library, names):
    session, lib = SimpleNamespace(device=device), SimpleNamespace(name=library)
    run = decode.Run(session, lib, "float16", decode.TINY, seed=0)
    assert list(run.loads_only(lambda: None, 1.0)) == names


def test_ratios_of_random_shapes_name_the_worst():
    rows = [
        Row({"kind": "random", "case": f"shape {i}", "backend": "torch"}, who, values={"call_s": x})
        for i, (ours, theirs) in enumerate([(1.0, 2.0), (3.0, 2.0), (2.0, 2.0)])
        for who, x in (("scree", ours), ("FA4", theirs))
    ]
    table = decode.tables(Result("decode", {}, {}, {}, "", rows))[-1]
    (line,) = table.lines
    assert line == ["torch", "FA4", "1.00", "0.50", "**1.50**", "shape 1", "2 of 3"]


def test_overview_of_decoding_has_the_ratio_to_each_peer():
    case = {"kind": "decode", "case": "B=1, KV 1,024", "backend": "torch", "page_size": 16}
    values = {"call_s": 8e-6, "call_rate": 4e12, "call_of_copy_share": 0.9}
    rows = [
        Row(case, "scree", values=values),
        Row(case, "scree, contiguous", values={"call_s": 7e-6}),
        Row(case, "FlashInfer", values={"call_s": 1e-5}),
        Row(case, "FA3 (contiguous)", values={"call_s": 4e-6}),
        Row(case, "loads only", values={"call_s": 3e-6}),
        Row({**case, "kind": "skew"}, "scree", values={"call_s": 1.0}),
    ]
    machine = {"tag": "h200", "gpu": "NVIDIA H200"}
    answer = pages.decode([Result("decode", {}, machine, {}, "2026-11-23", rows)])
    assert answer.table.header[5:] == ["/ FlashInfer", "/ FA3 (contiguous)"]
    label = "B=1, KV 1,024, pages of 16, torch"
    assert answer.table.lines == [["H200", label, "8 us", "4 TB/s", "90.0%", "0.80", "**2.00**"]]
    assert pages.decode([]) is None


VLLM_FILES = {
    "__init__.py": "raise ImportError('vLLM itself is not imported')",
    "v1/attention/ops/helpers.py": "from vllm.triton_utils import tl, triton",
    "v1/attention/ops/triton_unified_attention.py": """
import vllm.envs as envs
from vllm.platforms import current_platform
from vllm.v1.attention.ops.helpers import triton
from vllm.v1.kv_cache_interface import KVQuantMode
MODE = KVQuantMode.NONE, envs.VLLM_BATCH_INVARIANT, current_platform.fp8_dtype()
""",
}


@pytest.mark.needs("torch", "triton")
def test_load_vllm_imports_one_module_of_a_checkout(tmp_path, monkeypatch):
    for name, text in VLLM_FILES.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    before = object()
    monkeypatch.setitem(sys.modules, "vllm", before)
    monkeypatch.delitem(sys.modules, vllm_checkout.MODULE, raising=False)
    try:
        vllm_checkout.load(tmp_path)
        assert sys.modules[vllm_checkout.MODULE].MODE[0] == 0
        assert sys.modules["vllm"] is before and "vllm.platforms" not in sys.modules
    finally:
        sys.modules.pop(vllm_checkout.MODULE, None)
    with pytest.raises(ImportError):
        vllm_checkout.load(tmp_path / "vllm")


@pytest.mark.needs("triton")
def test_count_triton_launches_counts_calls_of_the_hook():
    from triton import knobs

    hook = knobs.runtime.launch_enter_hook
    before = list(hook.calls)
    assert decode.count_triton_launches(lambda: [hook("launch") for _ in range(2)]) == 2
    # Prepared launches pass no hooks.
    assert decode.count_triton_launches(lambda: None) == 0
    assert hook.calls == before
