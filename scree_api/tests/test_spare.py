"""Tokens behind the last row, the spare room of a fixed buffer, belong to no row: they reach no result, whatever they hold.

Libraries whose offsets are read for free refuse such a buffer outside of a trace. It comes out of compiled functions, so that
the operations meet it all the same: with PyTorch as one that has come out, with JAX inside of one, with MLX as it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from libraries import NAMES, load

import scree
from scree.data import chunk, truncate

LIBRARIES = [name for name in NAMES if name in ("torch", "jax", "mlx")]
LENGTHS = [2, 0, 3, 0]
ENDS_FILLED = [2, 0, 0, 3]  # what stands behind the last row may be taken for its tokens
#: Tokens -> those of the rows, and what stands behind them: numbers, elements, the second axis ragged, classes.
TOKENS = {
    "x": (np.asarray([3.0, -1.0, 2.0, 0.5, 2.5], np.float32), np.nan),
    "e": (np.arange(20.0, dtype=np.float32).reshape(5, 4), np.nan),
    "t": (np.arange(20.0, dtype=np.float32).reshape(4, 5), np.nan),
    "i": (np.asarray([3, 1, 2, 0, 2], np.int32), 7),
}

Case = Callable[..., Any]


def heads(xp: Any, e: scree.Array) -> scree.Array:
    return xp.reshape(e, (len(LENGTHS), None, 2, 2))


REDUCTIONS = "sum prod max min mean var std any all count_nonzero".split()
#: What is called with the namespace and the arrays that its parameters name. Those with a star read offsets.
CASES: dict[str, Case] = {
    **{f"{name} of everything": (lambda xp, e, name=name: getattr(xp, name)(e)) for name in (*REDUCTIONS, "argmax", "argmin")},
    **{f"{name} of all tokens": (lambda xp, t, name=name: getattr(xp, name)(t, axis=(0, 2))) for name in REDUCTIONS},
    **{f"{name} of rows": (lambda xp, t, name=name: getattr(xp, name)(t, axis=2))
       for name in (*REDUCTIONS, *"argmax argmin sort argsort cumulative_sum cumulative_prod flip".split())},
    **{f"{name}*": (lambda xp, x, name=name: getattr(xp, name)(x))
       for name in "unique_values unique_counts nonzero diff unstack".split()},
    "inverse*": lambda xp, x: xp.unique_inverse(x)[1],
    "falling": lambda xp, x: xp.sort(x, descending=True),
    "by its order": lambda xp, x: xp.take_along_axis(x, xp.argsort(x), axis=1),
    "with initial": lambda xp, x: xp.cumulative_sum(x, axis=1, include_initial=True),
    "isin": lambda xp, i: xp.isin(xp.arange(9), i),
    "not isin": lambda xp, t, x: xp.isin(x, t, invert=True),
    "concat": lambda xp, t: xp.concat([t, t, t], axis=0),
    "concat of rows": lambda xp, t: xp.concat([t, t, t], axis=2),
    "roll": lambda xp, x: xp.roll(x, 1, axis=1),
    "tile": lambda xp, x: xp.tile(x, (1, 2)),
    "tile of rows*": lambda xp, x: xp.tile(x, (2, 1)),
    "repeat": lambda xp, x: xp.repeat(x, 2, axis=1),
    "repeat by number*": lambda xp, x, i: xp.repeat(x, scree.align(i, like=x), axis=1),
    "vecdot": lambda xp, e: xp.vecdot(e, e, axis=1),
    "norm": lambda xp, e: xp.linalg.vector_norm(e),
    "a matrix a row": lambda xp, e: e @ xp.ones((4, 4, 3)),
    "a number a row": lambda xp, x: x + xp.arange(4)[:, None],
    "first tokens*": lambda xp, x: x[:, :1],
    "some rows*": lambda xp, e: (e[1:3], e[[2, 0]]),
    "a mask*": lambda xp, x: x[x > 0],
    "update*": lambda xp, x: scree.at(x)[x > 0].add(1.0),
    "softmax": lambda xp, x: (scree.softmax(x), scree.log_softmax(x), scree.logsumexp(x)),
    "padded": lambda xp, e: scree.to_padded(e, side="left", length=4),
    "attention": lambda xp, e: scree.attention(heads(xp, e), heads(xp, e), heads(xp, e), causal=True, return_lse=True),
    **{f"cross_entropy, {reduction}": (lambda xp, e, i, by=reduction: scree.cross_entropy(e, scree.align(i, like=e), reduction=by))
       for reduction in ("mean", "sum", "row_mean", "none")},
    "linear_cross_entropy": lambda xp, e, i: scree.linear_cross_entropy(e, xp.ones((6, 4)), scree.align(i, like=e)),
    "scatter": lambda xp, e, i: scree.scatter(e, i.values, 9),
    "scatter_add": lambda xp, e, i: scree.scatter_add(e.values, i, 9),
    "scatter of rows*": lambda xp, e: scree.scatter(e, xp.asarray([3, 1, 0, 2]), 5, axis=0),
    "group": lambda xp, e, i: scree.group(e, i.values, 9),
    "group and back": lambda xp, e, i: scree.scatter_add(*scree.group(e, i.values, 9), 5),
    "bucket*": lambda xp, e: scree.bucket(e)[0],
    "windows*": lambda xp, e: (chunk(e, 2)[0], truncate(e, 2, side="left")),
}  # fmt: skip
#: Those that JAX compiles here; reductions of everything and concat stand among its own tests.
COMPILED = [
    "with initial",
    "isin",
    "not isin",
    "by its order",
    "scatter",
    "scatter_add",
    "group",
    "cross_entropy, row_mean",
]


def arguments(case: str, spare: int) -> dict[str, np.ndarray]:
    """The tokens that a case wants, with so many spare ones behind them."""

    def room(x: np.ndarray, fill: float, axis: int) -> np.ndarray:
        shape = [spare if a == axis else n for a, n in enumerate(x.shape)]
        return np.concatenate([x, np.full(shape, fill, x.dtype)], axis)

    code = CASES[case].__code__
    wanted = code.co_varnames[1 : code.co_argcount - len(CASES[case].__defaults__ or ())]
    return {key: room(*TOKENS[key], int(key == "t")) for key in wanted}


def every(found: Any) -> list[Any]:
    """The rows and dense arrays of a result."""
    return [
        part
        for one in (found if isinstance(found, tuple | list) else [found])
        for part in (scree.unpack(one) if isinstance(one, scree.Array) else [one])
    ]


def parts(name: str, case: str, spare: int, read: bool) -> list[np.ndarray]:
    """The rows and dense arrays that come out where there are so many spare tokens; the offsets were read before or not."""
    lib, call = load(name), CASES[case]
    offsets = np.cumsum([0, *LENGTHS]).astype(np.int32)
    wanted = arguments(case, spare)
    tokens = [lib.make(x) for x in wanted.values()]

    def run(offsets: Any, *tokens: Any) -> Any:
        arrays = [
            scree.Array.unchecked(x, offsets, int(key == "t"), 3) for key, x in zip(wanted, tokens)
        ]
        if read:
            arrays[0].layout.read()
        return call(scree.namespace(*arrays), *arrays)

    if name == "jax":
        import jax

        run = jax.jit(run)
    return [np.asarray(part) for part in every(run(lib.make(offsets), *tokens))]


@pytest.mark.parametrize(
    "name, case",
    [(name, case) for name in LIBRARIES for case in (COMPILED if name == "jax" else CASES)],
)
def test_spare_tokens_belong_to_no_row(name: str, case: str) -> None:
    right = parts(name, case, 0, False)
    for read in (False, True) if name == "mlx" else (False,):
        for found, want in zip(parts(name, case, 4, read), right, strict=True):
            np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-7)


def gradients(case: str, spare: int) -> list[np.ndarray]:
    """Of a sum of all that comes out, each number with a factor of its own; on PyTorch."""
    import torch

    tokens = {key: torch.from_numpy(x) for key, x in arguments(case, spare).items()}
    inputs = [x.requires_grad_() for x in tokens.values() if x.is_floating_point()]
    offsets = torch.tensor(np.cumsum([0, *ENDS_FILLED]), dtype=torch.int32)
    arrays = [scree.Array.unchecked(x, offsets, int(key == "t"), 3) for key, x in tokens.items()]
    found = every(CASES[case](scree.namespace(*arrays), *arrays))
    grads: list[Any] = [None] * len(inputs)
    known = [part.flatten() for part in found if part.requires_grad]
    known = [part[part.isfinite()] for part in known]  # an empty row has NaN, or infinity
    if known:
        total = sum((part * torch.arange(1.0, 1 + len(part)).cos()).sum() for part in known)
        grads = list(torch.autograd.grad(total, inputs, allow_unused=True))
    return [
        np.zeros(x.shape, np.float32) if grad is None else grad.numpy()
        for x, grad in zip(inputs, grads, strict=True)
    ]


#: PyTorch has no gradient of distinct values.
SMOOTH = [
    case for case in CASES if "torch" in LIBRARIES and not case.startswith(("unique", "inverse"))
]


@pytest.mark.parametrize("case", SMOOTH)
def test_spare_tokens_reach_no_gradient(case: str) -> None:
    for found, want in zip(gradients(case, 4), gradients(case, 0), strict=True):
        fill = [(0, n - m) for n, m in zip(found.shape, want.shape, strict=True)]  # their own is 0
        np.testing.assert_allclose(found, np.pad(want, fill), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LIBRARIES)
def test_nothing_is_in_rows_without_tokens(name: str) -> None:
    lib = load(name)
    x = scree.Array.unchecked(lib.i([1, 2]), lib.i([0, 0, 0]), 0, 2)
    assert not np.any(np.asarray(lib.xp.isin(lib.i([1, 2, 3]), x)))


@pytest.mark.parametrize("name", LIBRARIES)
def test_rows_without_tokens_before_room(name: str) -> None:
    lib = load(name)
    xp, x = lib.xp, scree.Array.unchecked(lib.f(2, 2, 4), lib.i([0, 0, 0]), 0, 1)
    for f in (xp.sort, xp.argsort, xp.cumulative_sum):
        assert f(x, axis=1).shape == x.shape
    assert np.asarray(xp.sum(x, axis=1)).tolist() == np.zeros((2, 2, 4)).tolist()
    assert scree.attention(x, x, x, causal=True).shape == x.shape


@pytest.mark.parametrize("name", [name for name in LIBRARIES if name == "torch"])
def test_classes_in_rows_are_checked_nevertheless(name: str) -> None:
    lib = load(name)
    logits = scree.Array.unchecked(lib.f(5, 4), lib.i([0, 2, 3]), 0, 2)
    with pytest.raises(ValueError, match=r"targets: expected 0 <= class < 4, .* got 4 for token 2"):
        scree.cross_entropy(logits, logits.with_values(lib.i([0, 1, 4, 9, 9])))


def test_rows_that_are_alike_but_for_their_room() -> None:
    for name in LIBRARIES:
        lib = load(name)
        x, y = (scree.Array.unchecked(lib.f(n), lib.i([0, 2, 3]), 0, 2) for n in (5, 4))
        with pytest.raises(
            ValueError, match="add: expected rows of equal lengths, got 5 and 4 tokens"
        ):
            _ = x + y
