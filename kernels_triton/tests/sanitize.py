"""Run attention and its gradients under compute-sanitizer: `nox -s sanitize`.

The cases cover every kind of kernel on a few short rows, the kernels of paged caches included.
Arguments are indices of cases or `paged`; without arguments all cases run.
"""

import sys

import torch
from attention_reference import Case, problem

import scree
from scree_triton.attention import launch_configs
from scree_triton.attention.interface import make_spec
from scree_triton.attention.launch_configs import get_launch_config
from scree_triton.attention.metadata import VarlenLayout

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
ROWS, OTHERS = (165, 0, 130, 7), (70, 5, 164, 1)
SHORT, MORE_SHORT = (7, 0, 20, 30, 64, 1, 90), (9, 1, 20, 0, 64, 1, 40)
CASES = [
    *(
        Case(dtype, dim, dim_v, 2, 1, ROWS, causal=True, slack=20)
        for dtype, dim, dim_v in (
            (F16, 32, 32),
            (F16, 64, 64),
            (BF16, 128, 128),
            (F32, 64, 64),
            (F16, 96, 96),
            (BF16, 192, 128),
            (BF16, 256, 256),
            (F16, 16, 16),
            (F32, 128, 128),
        )
    ),
    *(
        Case(dtype, dim, dim_v, 2, 1, ROWS, OTHERS, window=(33, 20), softcap=15.0, alibi=True)
        for dtype, dim, dim_v in (
            (F16, 64, 64),
            (BF16, 128, 128),
            (F32, 32, 32),
            (F16, 40, 24),
            (F16, 256, 256),
            (F16, 16, 16),
        )
    ),
    Case(F16, 64, 64, 2, 2, ROWS, OTHERS),
    *(
        Case(dtype, dim, dim, 2, 1, SHORT, k_lengths, causal=True, slack=20)
        for dtype, dim in ((F16, 32), (BF16, 64), (F16, 128), (BF16, 256))
        for k_lengths in (None, MORE_SHORT)
    ),
]
#: Dtype of the queries and of the cache, heads, key heads, widths of keys and values, page size.
PAGED_CASES = [
    (BF16, BF16, 8, 2, 128, 128, 16),
    (BF16, torch.float8_e4m3fn, 8, 2, 128, 128, 16),
    (F16, torch.float8_e5m2, 8, 1, 64, 64, 256),
    (F16, F16, 8, 8, 64, 40, 1),
    (F32, F32, 6, 2, 24, 64, 24),
]
PAGED_OPTIONS = [{}, {"window": (40, 0), "softcap": 10.0}, {"split_size": 64}]


def run_paged(dtype, cache_dtype, heads, kv_heads, dim, dim_v, page_size) -> None:
    """Append to a cache, attend to it in several ways, and attend to contiguous keys."""
    for q_lengths, kv_lengths in (
        ((1, 1, 0, 1, 1), (300, 1, 20, 0, 64)),
        ((1,) * 40, tuple(range(1, 41))),
        ((1, 7, 200), (2000, 7, 264)),
    ):
        counts = [-(-n // page_size) for n in kv_lengths]
        pages = torch.randperm(sum(counts), dtype=torch.int32, device="cuda")
        table = scree.from_lengths(pages, counts)
        lengths = torch.tensor(kv_lengths, dtype=torch.int32, device="cuda")
        caches = [
            torch.zeros(sum(counts), page_size, kv_heads, width, device="cuda").to(cache_dtype)
            for width in (dim, dim_v)
        ]
        q, k, v = (
            scree.from_lengths(
                torch.randn(sum(q_lengths), h, d, device="cuda").to(dtype), q_lengths
            )
            for h, d in ((heads, dim), (kv_heads, dim), (kv_heads, dim_v))
        )
        cached = min(n - m for n, m in zip(kv_lengths, q_lengths))
        if cache_dtype == dtype and cached >= 0:
            scree.append_paged(*caches, k, v, table, lengths, q=q, rope={}, kernel="triton")
        arrays = q, *caches, table, lengths
        for options in PAGED_OPTIONS:
            options = {"causal": False, "return_lse": True, "kernel": "triton", **options}
            scree.paged_attention(*arrays, **options)
        if cached >= page_size:
            levels = [([0, len(kv_lengths)], [1])]
            scree.paged_attention(*arrays, shared_pages=levels, kernel="triton")
    keys = scree.from_lengths(torch.randn(331, kv_heads, dim, device="cuda").to(dtype), [330, 1])
    values = keys.with_values(torch.randn(331, kv_heads, dim_v, device="cuda").to(dtype))
    q = scree.from_lengths(torch.randn(2, heads, dim, device="cuda").to(dtype), [1, 1])
    scree.attention(q, keys, values, causal=True, kernel="triton")
    torch.cuda.synchronize()
    print("paged", dtype, cache_dtype, heads, kv_heads, dim, dim_v, page_size, flush=True)


def main() -> None:
    """Run the cases given as arguments."""
    if sys.argv[1:] in ([], ["paged"]):
        for paged_case in PAGED_CASES:
            run_paged(*paged_case)
        if sys.argv[1:]:
            return
    launch_configs.MANY_ROWS = 1
    for case in [CASES[int(i)] for i in sys.argv[1:]] or CASES:
        p = problem(case, "cuda")
        # Only calls with a bound on the longest row can share tiles.
        is_short = case.q_lengths is SHORT
        layout = VarlenLayout(p.cu_q, p.cu_k, {}, *([max(SHORT)] if is_short else []))
        spec = make_spec(case.causal, *case.window, case.dim**-0.5, case.softcap)
        config = get_launch_config(p.q, p.k, p.v, layout, spec, case.alibi)
        out, lse = config.forward(p.q, p.k, p.v, p.slopes, layout, spec)
        config.backward(p.q, p.k, p.v, p.slopes, out, lse, p.dout, p.dlse.t(), layout, spec)
        torch.cuda.synchronize()
        print(case.name, type(config).__name__, flush=True)


if __name__ == "__main__":
    main()
