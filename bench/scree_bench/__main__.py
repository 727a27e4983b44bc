"""`python -m scree_bench`: scree against the best hand-written form of each library, interleaved, medians and ratios."""

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np

import scree

Thunk = Callable[[], Any]


class Case(NamedTuple):
    """`ours` against `peer`; `limit` bounds the ratio of the two, or their difference in seconds."""

    name: str
    ours: Thunk
    peer: Thunk
    limit: float
    difference: bool = False


def median_times(ours: Thunk, peer: Thunk, budget: float) -> tuple[float, float]:
    """Median seconds a call of both, measured in turn so that a drift of the machine meets both alike."""
    ours(), peer()
    start = time.perf_counter()
    ours(), peer()
    once = time.perf_counter() - start
    inner = max(1, int(2e-3 / once))
    samples: tuple[list[float], list[float]] = ([], [])
    stop = time.perf_counter() + budget
    while time.perf_counter() < stop or len(samples[0]) < 5:
        for thunk, times in zip((ours, peer), samples, strict=True):
            start = time.perf_counter()
            for _ in range(inner):
                thunk()
            times.append((time.perf_counter() - start) / inner)
    return statistics.median(samples[0]), statistics.median(samples[1])


# ------------------------------------------------------------------------------------------------ libraries
class Library(NamedTuple):
    """How one library makes an array, finishes its work, and does by hand what scree does."""

    asarray: Callable[[np.ndarray], Any]
    wait: Callable[[Any], Any]
    pack: Callable[[list[Any]], Any]
    to_padded: Callable[[Any, Any, int], Any]
    from_padded: Callable[[Any, Any], Any]


def numpy_library() -> Library:
    def to_padded(values: Any, mask: Any, length: int) -> Any:
        out = np.zeros((*mask.shape, *values.shape[1:]), values.dtype)
        out[mask] = values
        return out

    return Library(np.asarray, lambda x: x, np.concatenate, to_padded, lambda padded, mask: padded[mask])


def torch_library() -> Library:
    import torch

    def to_padded(values: Any, mask: Any, length: int) -> Any:
        out = torch.zeros((*mask.shape, *values.shape[1:]), dtype=values.dtype)
        out[mask] = values
        return out

    return Library(torch.from_numpy, lambda x: x, torch.cat, to_padded, lambda padded, mask: padded[mask])


def jax_library() -> Library:
    import jax
    import jax.numpy as jnp

    def pack(rows: list[Any]) -> Any:
        return jnp.asarray(np.concatenate([np.asarray(x) for x in rows]))

    def to_padded(values: Any, mask: Any, length: int) -> Any:
        out = np.zeros((*mask.shape, *values.shape[1:]), values.dtype)
        out[np.asarray(mask)] = np.asarray(values)
        return jnp.asarray(out)

    def from_padded(padded: Any, mask: Any) -> Any:
        return jnp.asarray(np.asarray(padded)[np.asarray(mask)])

    return Library(jnp.asarray, jax.block_until_ready, pack, to_padded, from_padded)


def mlx_library() -> Library:
    import mlx.core as mx

    def wait(x: Any) -> Any:
        mx.eval(x)
        return x

    def to_padded(values: Any, mask: Any, length: int) -> Any:
        out = np.zeros((*mask.shape, *values.shape[1:]), np.float32)
        out[np.asarray(mask)] = np.asarray(values)
        return mx.array(out)

    def from_padded(padded: Any, mask: Any) -> Any:
        return mx.array(np.asarray(padded)[np.asarray(mask)])

    return Library(mx.array, wait, mx.concatenate, to_padded, from_padded)


LIBRARIES: dict[str, Callable[[], Library]] = {
    "numpy": numpy_library, "torch": torch_library, "jax": jax_library, "mlx": mlx_library,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------- cases
def lognormal(n: int, total: int, rng: np.random.Generator, sigma: float = 0.7) -> np.ndarray:
    """Lengths of `n` rows that add up to about `total`."""
    x = rng.lognormal(0, sigma, n)
    return np.maximum(1, np.round(x / x.sum() * total)).astype(np.int64)


def general_cases(name: str, lib: Library, quick: bool) -> list[Case]:
    """Elementwise overhead, row sums, packing and padding."""
    rng = np.random.default_rng(0)
    wait = lib.wait
    small = scree.from_lengths(lib.asarray(rng.standard_normal((13, 8)).astype(np.float32)), [4, 2, 7])
    xp, bare = scree.namespace(small), small.layout.xp
    lengths = rng.poisson(50, 10_000 if quick else 100_000)
    long = scree.from_lengths(lib.asarray(rng.standard_normal(lengths.sum()).astype(np.float32)), lengths)
    counts = rng.poisson(20, 1_000 if quick else 5_000)
    rows = [lib.asarray(rng.standard_normal((int(n), 8)).astype(np.float32)) for n in counts]
    many = scree.pack(rows)
    padded, mask = scree.to_padded(many)
    longest, values = int(padded.shape[1]), small.values

    def padded_sum() -> Any:
        return wait(bare.sum(scree.to_padded(long)[0], axis=1))

    def reduceat() -> Any:
        return np.add.reduceat(long.values, long.offsets[:-1])

    def case(what: str, ours: Thunk, peer: Thunk, limit: float) -> Case:
        return Case(f"{what} {len(rows):,} rows", lambda: wait(ours()), lambda: wait(peer()), limit)

    return [
        Case("exp: over the bare call", lambda: wait(xp.exp(small).values), lambda: wait(bare.exp(values)), 25e-6, True),
        Case("add: over the bare call", lambda: wait((small + small).values), lambda: wait(values + values), 25e-6, True),
        Case(f"sum of {len(lengths):,} rows, against reduceat", lambda: xp.sum(long, axis=1), reduceat, 2)
        if name == "numpy"
        else Case(f"sum of {len(lengths):,} rows, against padding", lambda: wait(xp.sum(long, axis=1)), padded_sum, 1),
        case("pack", lambda: scree.pack(rows).values, lambda: lib.pack(rows), 3),
        case("to_padded", lambda: scree.to_padded(many)[0], lambda: lib.to_padded(many.values, mask, longest), 3),
        case("from_padded", lambda: scree.from_padded(padded, mask).values, lambda: lib.from_padded(padded, mask), 3),
    ]


def attention_cases(name: str, lib: Library, quick: bool) -> list[Case]:
    """16 log-normal sequences, about 2,000 real and 4,500 padded tokens, 4 heads x 32, float32, causal."""
    rng = np.random.default_rng(11)
    lengths = lognormal(16, 2_000, rng)
    arrays = [rng.standard_normal((lengths.sum(), 4, 32)).astype(np.float32) for _ in range(3)]
    q = scree.from_lengths(lib.asarray(arrays[0]), lengths)
    k, v = (q.with_values(lib.asarray(x)) for x in arrays[1:])
    dense = [scree.to_padded(scree.from_lengths(x, lengths))[0].transpose(0, 2, 1, 3) for x in arrays]
    n = dense[0].shape[2]
    hidden = np.triu(np.ones((n, n), bool), 1)

    def ours() -> Any:
        return lib.wait(scree.attention(q, k, v, causal=True).values)

    def naive() -> Any:
        a, b, c = dense
        score = np.einsum("nhid,nhjd->nhij", a, b) / math.sqrt(32)
        score = np.where(hidden, -np.inf, score)
        score = np.exp(score - score.max(-1, keepdims=True))
        return np.einsum("nhij,nhjd->nhid", score / score.sum(-1, keepdims=True), c)

    def matmul() -> Any:
        a, b, c = dense
        score = a @ b.transpose(0, 1, 3, 2) / math.sqrt(32)
        score = np.where(hidden, -np.inf, score)
        score = np.exp(score - score.max(-1, keepdims=True))
        return (score / score.sum(-1, keepdims=True)) @ c

    naive_limit = 1 / 20 if name in ("numpy", "torch") else 1
    cases = [
        Case(f"attention, {lengths.sum():,} of {16 * n:,} tokens, against naive NumPy (einsum)", ours, naive, naive_limit),
        Case("attention, against padded NumPy (matmul)", ours, matmul, 1),
    ]
    if name == "torch":
        import torch

        a, b, c = (torch.from_numpy(np.ascontiguousarray(x)) for x in dense)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        cases.append(Case("attention, against padded SDPA", ours, lambda: sdpa(a, b, c, is_causal=True), 1))
    return cases


def sort_case(name: str, lib: Library, quick: bool) -> list[Case]:
    """Sorting within rows, against a sort of values and then, stably, of rows."""
    rng = np.random.default_rng(2)
    lengths = rng.poisson(50, 10_000 if quick else 100_000)
    values = rng.standard_normal(lengths.sum()).astype(np.float32)
    rows = np.repeat(np.arange(lengths.size), lengths)
    arr = scree.from_lengths(lib.asarray(values), lengths)
    xp, bare, ids = scree.namespace(arr), arr.layout.xp, lib.asarray(rows)

    def by_keys() -> Any:
        order = bare.argsort(arr.values, stable=True)
        return wait(bare.take(arr.values, bare.take(order, bare.argsort(bare.take(ids, order), stable=True))))

    wait, what = lib.wait, f"sort within {lengths.size:,} rows, against "
    if name == "numpy":
        return [Case(what + "lexsort", lambda: xp.sort(arr, axis=1), lambda: values[np.lexsort((values, rows))], 3)]
    return [Case(what + "two sorts", lambda: wait(xp.sort(arr, axis=1).values), by_keys, 3)]


def rival_cases(quick: bool) -> list[Case]:
    """awkward-array and scikit-hep's ragged, on NumPy."""
    import awkward as ak
    import ragged

    rng = np.random.default_rng(3)
    lengths = rng.poisson(50, 10_000 if quick else 100_000)
    arr = scree.from_lengths(rng.standard_normal(lengths.sum()), lengths)
    per_row, xp = rng.standard_normal((lengths.size, 1)), scree.namespace(arr)
    offsets = ak.index.Index64(arr.offsets.astype(np.int64))
    theirs = ak.Array(ak.contents.ListOffsetArray(offsets, ak.contents.NumpyArray(arr.values)))
    wrapped, wrapped_row = ragged.array(theirs), ragged.array(per_row[:, 0])
    work: dict[str, tuple[Thunk, Thunk, Thunk]] = {
        "add": (lambda: arr + arr, lambda: theirs + theirs, lambda: wrapped + wrapped),
        "sum": (lambda: xp.sum(arr, axis=1), lambda: ak.sum(theirs, axis=1), lambda: ragged.sum(wrapped, axis=1)),
        "sort": (lambda: xp.sort(arr, axis=1), lambda: ak.sort(theirs, axis=1), lambda: ragged.sort(wrapped, axis=1)),
        "argmax": (lambda: xp.argmax(arr, axis=1), lambda: ak.argmax(theirs, axis=1), lambda: ragged.argmax(wrapped, axis=1)),
        "add (n, 1)": (lambda: arr + per_row, lambda: theirs + per_row[:, 0], lambda: wrapped + wrapped_row),
        "mask": (lambda: arr[arr > 0], lambda: theirs[theirs > 0], lambda: wrapped[wrapped > 0]),
    }
    names = ("awkward", "ragged")
    return [
        Case(f"{what} of {lengths.size:,} rows, against {who}", calls[0], peer, 1)
        for what, calls in work.items()
        for who, peer in zip(names, calls[1:], strict=True)
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the cases, print a table or JSON, and fail where a limit is passed."""
    parser = argparse.ArgumentParser(prog="scree_bench", description=__doc__)
    parser.add_argument("--backend", choices=[*LIBRARIES, "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, shorter measurement")
    parser.add_argument("--rivals", action="store_true", help="against awkward-array and ragged, on NumPy")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args(arguments)
    names = list(LIBRARIES) if options.backend == "all" else [options.backend]
    results = []
    for name in names:
        lib = LIBRARIES[name]()
        cases = [case for make in (general_cases, sort_case, attention_cases) for case in make(name, lib, options.quick)]
        for case in cases + (rival_cases(options.quick) if options.rivals and name == "numpy" else []):
            ours, peer = median_times(case.ours, case.peer, 0.3 if options.quick else 1.5)
            value = ours - peer if case.difference else ours / peer
            results.append({"backend": name, "case": case.name, "ours_s": ours, "peer_s": peer, "value": value,
                            "limit": case.limit, "within": value <= case.limit})  # fmt: skip
            if not options.json:
                shown = f"{value * 1e6:8.1f} us" if case.difference else f"{value:8.2f} x "
                mark = "" if value <= case.limit else "  <- over the limit"
                print(f"{name:6} {case.name:68} {ours * 1e6:11.1f} {peer * 1e6:11.1f} us {shown}{mark}", flush=True)
    machine = {"date": date.today().isoformat(), "python": platform.python_version(), "machine": platform.machine(),
               "processor": platform.processor(), "scree": scree.__version__, "numpy": version("numpy")}  # fmt: skip
    if options.json:
        print(json.dumps({"machine": machine, "results": results}, indent=1))
    return 0 if all(r["within"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
