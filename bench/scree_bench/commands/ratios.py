"""`ratios`: scree against the best hand-written form per library; a passed limit fails the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

import scree

from .. import plots
from ..formulas import softmax
from ..lengths import lognormal_with_total
from ..libraries import MeasuredLibrary, installed_libraries
from ..measure import Thunk
from ..options import Backend, Out, Quick, Seconds
from ..results import OK, Result, Row
from ..session import Session


class Case(NamedTuple):
    """A comparison of `ours` and `peer`; `limit` bounds the ratio or the difference in seconds."""

    name: str
    ours: Thunk
    peer: Thunk
    limit: float
    difference: bool = False


class Hand(NamedTuple):
    """Hand-written forms of scree's functions in one library.

    `to_padded` takes values and mask, `from_padded` a padded array and mask.
    """

    pack: Callable[[list[Any]], Any]
    to_padded: Callable[[Any, Any], Any]
    from_padded: Callable[[Any, Any], Any]


def _in_place(xp: Any) -> Hand:
    """Return the forms for NumPy, and for libraries whose arrays are mutable like its arrays."""

    def to_padded(values: Any, mask: Any) -> Any:
        out = xp.zeros((*mask.shape, *values.shape[1:]), dtype=values.dtype)
        out[mask] = values
        return out

    return Hand(xp.concatenate, to_padded, lambda padded, mask: padded[mask])


def _by_numpy(
    make: Callable[[np.ndarray], Any], pack: Callable[[list[Any]], Any] | None = None
) -> Hand:
    """Return forms that convert to NumPy and back.

    They are the fastest on the CPU, where JAX outside of `jit` compiles for every new shape.
    """

    def detour(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: make(function(*map(np.asarray, args)))

    def concatenate(rows: list[Any]) -> Any:
        return make(np.concatenate([np.asarray(x) for x in rows]))

    hand = _in_place(np)
    return Hand(pack or concatenate, detour(hand.to_padded), detour(hand.from_padded))


def _mlx() -> Hand:
    import mlx.core as mx

    return _by_numpy(mx.array, mx.concatenate)


HANDS: dict[str, Callable[[], Hand]] = {
    "numpy": lambda: _in_place(np),
    "torch": lambda: _in_place(import_module("torch")),
    "jax": lambda: _by_numpy(import_module("jax.numpy").asarray),
    "mlx": _mlx,
}


# ------------------------------------------------------------------------------------------- cases
def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def general_cases(lib: MeasuredLibrary, quick: bool) -> list[Case]:
    """Return cases of elementwise overhead, row sums, packing and padding."""
    rng, hand, wait = np.random.default_rng(0), HANDS[lib.name](), lib.wait
    small: Any = scree.from_lengths(lib.make(_normal(rng, 13, 8)), [4, 2, 7])
    xp, bare = scree.namespace(small), small.layout.xp
    lengths = rng.poisson(50, 10_000 if quick else 100_000)
    long = scree.from_lengths(lib.make(_normal(rng, lengths.sum())), lengths)
    counts = rng.poisson(20, 1_000 if quick else 5_000)
    rows = [lib.make(_normal(rng, int(n), 8)) for n in counts]
    many = scree.pack(rows)
    padded, mask = scree.to_padded(many)
    values = small.values

    def padded_sum() -> Any:
        return wait(bare.sum(scree.to_padded(long)[0], axis=1))

    def reduceat() -> Any:
        return np.add.reduceat(long.values, long.offsets[:-1])

    def case(what: str, ours: Thunk, peer: Thunk, limit: float) -> Case:
        return Case(f"{what} {len(rows):,} rows", lambda: wait(ours()), lambda: wait(peer()), limit)

    return [
        Case(
            "exp: over the bare call",
            lambda: wait(xp.exp(small).values),
            lambda: wait(bare.exp(values)),
            25e-6,
            True,
        ),
        Case(
            "add: over the bare call",
            lambda: wait((small + small).values),
            lambda: wait(values + values),
            25e-6,
            True,
        ),
        Case(
            f"sum of {len(lengths):,} rows, against reduceat",
            lambda: xp.sum(long, axis=1),
            reduceat,
            2,
        )
        if lib.name == "numpy"
        else Case(
            f"sum of {len(lengths):,} rows, against padding",
            lambda: wait(xp.sum(long, axis=1)),
            padded_sum,
            1,
        ),
        case("pack", lambda: scree.pack(rows).values, lambda: hand.pack(rows), 3),
        case(
            "to_padded",
            lambda: scree.to_padded(many)[0],
            lambda: hand.to_padded(many.values, mask),
            3,
        ),
        case(
            "from_padded",
            lambda: scree.from_padded(padded, mask).values,
            lambda: hand.from_padded(padded, mask),
            3,
        ),
    ]


def attention_cases(lib: MeasuredLibrary, quick: bool) -> list[Case]:
    """Return cases of causal attention in float32, with 4 heads x 32.

    The 16 log-normal sequences have about 2,000 real and 4,500 padded tokens.
    """
    rng = np.random.default_rng(11)
    lengths = lognormal_with_total(16, 2_000, rng)
    arrays = [_normal(rng, lengths.sum(), 4, 32) for _ in range(3)]
    q = scree.from_lengths(lib.make(arrays[0]), lengths)
    k, v = (q.with_values(lib.make(x)) for x in arrays[1:])
    dense = [
        scree.to_padded(scree.from_lengths(x, lengths))[0].transpose(0, 2, 1, 3) for x in arrays
    ]
    n = dense[0].shape[2]
    hidden = np.triu(np.ones((n, n), bool), 1)

    def ours() -> Any:
        return lib.wait(scree.attention(q, k, v, causal=True).values)

    def weights(score: np.ndarray) -> np.ndarray:
        return softmax(np, np.where(hidden, -np.inf, score / math.sqrt(32)))

    def naive() -> Any:
        a, b, c = dense
        return np.einsum("nhij,nhjd->nhid", weights(np.einsum("nhid,nhjd->nhij", a, b)), c)

    def matmul() -> Any:
        a, b, c = dense
        return weights(a @ b.transpose(0, 1, 3, 2)) @ c

    naive_limit = 1 / 20 if lib.name in ("numpy", "torch") else 1
    # On a CPU, matrix products of MLX are slower than NumPy's.
    matmul_limit = 4 if lib.name == "mlx" else 1
    cases = [
        Case(
            f"attention, {lengths.sum():,} of {16 * n:,} tokens, against naive NumPy (einsum)",
            ours,
            naive,
            naive_limit,
        ),
        Case("attention, against padded NumPy (matmul)", ours, matmul, matmul_limit),
    ]
    if lib.name == "torch":
        import torch

        a, b, c = (torch.from_numpy(np.ascontiguousarray(x)) for x in dense)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        cases.append(
            Case("attention, against padded SDPA", ours, lambda: sdpa(a, b, c, is_causal=True), 1)
        )
    return cases


def sort_case(lib: MeasuredLibrary, quick: bool) -> list[Case]:
    """Return a case of sorting within rows, against a sort of values and a stable sort of rows."""
    rng = np.random.default_rng(2)
    lengths = rng.poisson(50, 10_000 if quick else 100_000)
    values = _normal(rng, lengths.sum())
    rows = np.repeat(np.arange(lengths.size), lengths)
    arr = scree.from_lengths(lib.make(values), lengths)
    xp, bare, ids = scree.namespace(arr), arr.layout.xp, lib.make(rows, lib.arrays.default_integer)

    def by_keys() -> Any:
        order = bare.argsort(arr.values, stable=True)
        return wait(
            bare.take(
                arr.values, bare.take(order, bare.argsort(bare.take(ids, order), stable=True))
            )
        )

    wait, what = lib.wait, f"sort within {lengths.size:,} rows, against "
    if lib.name == "numpy":
        return [
            Case(
                what + "lexsort",
                lambda: xp.sort(arr, axis=1),
                lambda: values[np.lexsort((values, rows))],
                3,
            )
        ]
    return [Case(what + "two sorts", lambda: wait(xp.sort(arr, axis=1).values), by_keys, 3)]


def other_library_cases(quick: bool) -> list[Case]:
    """Return cases against awkward-array and scikit-hep's ragged, on NumPy."""
    import awkward as ak
    import ragged

    rng = np.random.default_rng(3)
    lengths = rng.poisson(50, 10_000 if quick else 100_000)
    arr: Any = scree.from_lengths(rng.standard_normal(lengths.sum()), lengths)
    per_row, xp = rng.standard_normal((lengths.size, 1)), scree.namespace(arr)
    offsets = ak.index.Index64(arr.offsets.astype(np.int64))
    theirs = ak.Array(ak.contents.ListOffsetArray(offsets, ak.contents.NumpyArray(arr.values)))
    wrapped, wrapped_row = ragged.array(theirs), ragged.array(per_row[:, 0])
    work: dict[str, tuple[float, Thunk, Thunk, Thunk]] = {
        "add": (1, lambda: arr + arr, lambda: theirs + theirs, lambda: wrapped + wrapped),
        "sum": (
            1.1,
            lambda: xp.sum(arr, axis=1),
            lambda: ak.sum(theirs, axis=1),
            lambda: ragged.sum(wrapped, axis=1),
        ),
        "sort": (
            1,
            lambda: xp.sort(arr, axis=1),
            lambda: ak.sort(theirs, axis=1),
            lambda: ragged.sort(wrapped, axis=1),
        ),
        # A compiled loop finds the index along with the maximum. NumPy's reduceat finds only the
        # maximum, which already takes as long.
        "argmax": (
            3,
            lambda: xp.argmax(arr, axis=1),
            lambda: ak.argmax(theirs, axis=1),
            lambda: ragged.argmax(wrapped, axis=1),
        ),
        "add (n, 1)": (
            1,
            lambda: arr + per_row,
            lambda: theirs + per_row[:, 0],
            lambda: wrapped + wrapped_row,
        ),
        "mask": (1, lambda: arr[arr > 0], lambda: theirs[theirs > 0], lambda: wrapped[wrapped > 0]),
    }
    return [
        Case(f"{what} of {lengths.size:,} rows, against {contender}", ours, peer, limit)
        for what, (limit, ours, *peers) in work.items()
        for contender, peer in zip(("awkward", "ragged"), peers, strict=True)
    ]


def command(
    backend: Backend = "all",
    seconds: Seconds = 1.0,
    quick: Quick = False,
    out: Out = None,
    rivals: Annotated[
        bool, typer.Option(help="Add cases against awkward-array and ragged, on NumPy.")
    ] = True,
) -> None:
    """Measure ratios to the best hand-written form of each library, with a limit for each.

    The exit status is 1 if a limit is passed, so that a script can enforce the limits.
    """
    with Session("ratios", locals()) as session:
        for lib in installed_libraries(session, backend):
            cases = [
                case
                for make in (general_cases, sort_case, attention_cases)
                for case in make(lib, quick)
            ]
            if rivals and lib.name == "numpy":
                try:
                    cases += other_library_cases(quick)
                except ImportError as error:
                    session.leave_out("awkward and ragged", f"not installed ({error})")
            for case in session.track(cases, lib.name):
                _measure(session, lib, case)
    over = [row for row in session.result.rows if _over(row)]
    for row in over:
        session.say(f"over the limit: {row.case['backend']}, {row.case['what']}")
    raise typer.Exit(1 if over else 0)


def _over(row: Row) -> bool:
    return row.status != OK or any(
        row.values.get(f"over_{x}", 0) > row.values.get(f"limit_{x}", 0) for x in ("s", "ratio")
    )


def _measure(session: Session, lib: MeasuredLibrary, case: Case) -> None:
    what = {"backend": lib.name, "what": case.name}
    contenders = {"scree": lambda: case.ours, "by hand": lambda: case.peer}
    ours, peer = session.time(what, "call_s", contenders).values()
    if ours.status == peer.status == OK:
        a, b = ours.values["call_s"], peer.values["call_s"]
        name, value = ("over_s", a - b) if case.difference else ("over_ratio", a / b)
        ours.values |= {name: value, name.replace("over", "limit"): case.limit}


def pictures(result: Result) -> plots.Pictures:
    """Return pictures of the ratios and their limits, one per library."""
    rows = [row for row in result.rows if "over_ratio" in row.values]

    def paint(figure: Any, name: str) -> None:
        groups = {
            row.case["what"].replace(", against ", "\nagainst "): {
                "scree's time over the time by hand": row.values["over_ratio"],
                "limit": row.values["limit_ratio"],
            }
            for row in rows if row.case["backend"] == name
        }  # fmt: skip
        title = f"{name}: time over the best form by hand, one scale per case"
        plots.bars(figure.add_subplot(), groups, "over_ratio", title, apart=True)

    return {
        f"ratios-{name}": partial(paint, name=name)
        for name in dict.fromkeys(row.case["backend"] for row in rows)
    }
