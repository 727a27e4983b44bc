"""The tail: tokens after the last row belong to no row and reach no result, whatever they hold.

A library whose offsets are read for free refuses such a buffer outside of a trace. Compiled
functions return such buffers, so the operations have to accept them. The tests build them as eager
arrays on PyTorch and MLX, and inside of a compiled function on JAX. NumPy has to refuse them.
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
NONEMPTY_LAST_ROW = [2, 0, 0, 3]  # a wrong kernel would add the tail to this row
#: Parameter -> values of the rows, fill of the tail: scalars, features, ragged_dim=1, classes.
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
#: Name -> call with the namespace and the arrays that its parameters name. Names with a star read
#: offsets.
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
    "update": lambda xp, x: scree.at(x)[x > 0].add(1.0),
    "softmax": lambda xp, x: (scree.softmax(x), scree.log_softmax(x), scree.logsumexp(x)),
    "softmax of elements": lambda xp, e: (scree.softmax(e, axis=-1), scree.log_softmax(e, axis=2), scree.logsumexp(e, axis=2)),
    "shift": lambda xp, x, e, t: (scree.shift(x, 1), scree.shift(e, -2, fill_value=7), scree.shift(t, 0)),
    "broadcast_rows": lambda xp, e: e + scree.broadcast_rows(xp.sum(e, axis=1), e),
    "activations": lambda xp, e, t: (scree.relu(e), scree.gelu(t), scree.gelu(e, approximate="tanh"), scree.silu(e), scree.erf(e)),
    "conv1d": lambda xp, e: (scree.conv1d(e, xp.ones((4, 1, 3)), groups=4), scree.conv1d(e, xp.ones((2, 4, 3)), padding="same")),
    "padded": lambda xp, e: scree.to_padded(e, side="left", length=4),
    "attention": lambda xp, e: scree.attention(heads(xp, e), heads(xp, e), heads(xp, e), causal=True, return_lse=True),
    **{f"cross_entropy, {reduction}": (lambda xp, e, i, by=reduction: scree.cross_entropy(e, scree.align(i, like=e), reduction=by))
       for reduction in ("mean", "sum", "row_mean", "none")},
    **{f"cross_entropy with options, {reduction}": (lambda xp, e, i, by=reduction: scree.cross_entropy(
           e, scree.align(i, like=e), class_weights=xp.arange(4) + xp.ones(4), label_smoothing=0.1, softcap=3.0, z_loss=0.1,
           reduction=by, return_accuracy=True))
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
#: Cases compiled with JAX; test_transforms_jax.py has full reductions and concat.
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


def arguments(case: str, tail: int) -> dict[str, np.ndarray]:
    """Return the values that a case takes, with a tail of `tail` tokens."""

    def append_tail(x: np.ndarray, fill: float, axis: int) -> np.ndarray:
        shape = [tail if a == axis else n for a, n in enumerate(x.shape)]
        return np.concatenate([x, np.full(shape, fill, x.dtype)], axis)

    code = CASES[case].__code__
    wanted = code.co_varnames[1 : code.co_argcount - len(CASES[case].__defaults__ or ())]
    return {key: append_tail(*TOKENS[key], int(key == "t")) for key in wanted}


def flatten(result: Any) -> list[Any]:
    """Return the rows and dense arrays of a result."""
    return [
        part
        for item in (result if isinstance(result, tuple | list) else [result])
        for part in (scree.unpack(item) if isinstance(item, scree.Array) else [item])
    ]


def evaluate(name: str, case: str, tail: int, read: bool) -> list[np.ndarray]:
    """Return the rows and dense arrays of a case with a tail.

    `read` reads the offsets before the call.
    """
    lib, call = load(name), CASES[case]
    offsets = np.cumsum([0, *LENGTHS]).astype(np.int32)
    wanted = arguments(case, tail)
    tokens = [lib.make(x) for x in wanted.values()]

    def run(offsets: Any, *tokens: Any) -> Any:
        arrays = [
            scree.Array.unchecked(x, offsets, int(key == "t"), 3) for key, x in zip(wanted, tokens)
        ]
        if read:
            arrays[0].layout.read_offsets()
        return call(scree.namespace(*arrays), *arrays)

    if name == "jax":
        import jax

        run = jax.jit(run)
    return [np.asarray(part) for part in flatten(run(lib.make(offsets), *tokens))]


@pytest.mark.parametrize(
    "name, case",
    [(name, case) for name in LIBRARIES for case in (COMPILED if name == "jax" else CASES)],
)
def test_operation_ignores_the_tail(name: str, case: str) -> None:
    expected = evaluate(name, case, 0, False)
    assert expected
    for read in (False, True) if name == "mlx" else (False,):
        for got, want in zip(evaluate(name, case, 4, read), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def gradients(case: str, tail: int) -> list[np.ndarray]:
    """Return the gradients, on PyTorch, of a sum of all results with a different factor per number."""
    import torch

    tokens = {key: torch.from_numpy(x) for key, x in arguments(case, tail).items()}
    inputs = [x.requires_grad_() for x in tokens.values() if x.is_floating_point()]
    offsets = torch.tensor(np.cumsum([0, *NONEMPTY_LAST_ROW]), dtype=torch.int32)
    arrays = [scree.Array.unchecked(x, offsets, int(key == "t"), 3) for key, x in tokens.items()]
    results = flatten(CASES[case](scree.namespace(*arrays), *arrays))
    grads: list[Any] = [None] * len(inputs)
    finite = [part.flatten() for part in results if part.requires_grad]
    finite = [part[part.isfinite()] for part in finite]  # an empty row has NaN, or infinity
    if finite:
        total = sum((part * torch.arange(1.0, 1 + len(part)).cos()).sum() for part in finite)
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
def test_gradient_of_the_tail_is_zero(case: str) -> None:
    for got, want in zip(gradients(case, 4), gradients(case, 0), strict=True):
        fill = [
            (0, n - m) for n, m in zip(got.shape, want.shape, strict=True)
        ]  # gradient of the tail
        np.testing.assert_allclose(got, np.pad(want, fill), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LIBRARIES)
def test_mask_that_is_true_in_the_tail_selects_tokens_of_rows_only(name: str) -> None:
    lib = load(name)
    x = scree.Array.unchecked(lib.i([1, 2, 3, 100]), lib.i([0, 2, 3]), 0, 2)
    chosen = x[x.with_values(lib.b([True, False, True, True]))]
    assert np.asarray(chosen.values).tolist() == [1, 3] and int(lib.xp.sum(chosen)) == 4


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("counts", [[1, 2, 1, 1], [2]])
def test_repeat_by_ragged_counts_drops_the_tail(name: str, counts: list[int]) -> None:
    lib = load(name)
    x = scree.Array.unchecked(lib.i([1, 2, 3, 100]), lib.i([0, 2, 3]), 0, 2)
    if len(counts) == 1:
        counts = counts * 4
    repeated = lib.xp.repeat(x, x.with_values(lib.i(counts)), axis=1)
    expected = np.repeat([1, 2, 3], counts[:3])
    assert np.asarray(repeated.values).tolist() == expected.tolist()
    assert int(lib.xp.sum(repeated)) == expected.sum()


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("keepdims", [False, True])
def test_argmax_of_all_without_tokens_of_rows_is_minus_one(name: str, keepdims: bool) -> None:
    lib = load(name)
    x = scree.Array.unchecked(lib.f(2), lib.i([0, 0]), 0, 2)
    assert np.asarray(lib.xp.argmax(x, keepdims=keepdims)).item() == -1


@pytest.mark.parametrize("name", LIBRARIES)
def test_attention_of_a_tail_alone_is_zero(name: str) -> None:
    lib = load(name)
    x = scree.Array.unchecked(lib.f(4, 1, 4), lib.i([0, 0, 0]), 0, 0)
    out = scree.attention(x, x, x, kernel="standard")
    assert out.shape == x.shape and not np.any(np.asarray(out.values))


@pytest.mark.parametrize("name", LIBRARIES)
def test_isin_of_rows_without_tokens_is_false(name: str) -> None:
    lib = load(name)
    x = scree.Array.unchecked(lib.i([1, 2]), lib.i([0, 0, 0]), 0, 2)
    assert not np.any(np.asarray(lib.xp.isin(lib.i([1, 2, 3]), x)))


@pytest.mark.parametrize("name", LIBRARIES)
def test_rows_without_tokens_before_a_tail_keep_their_shape(name: str) -> None:
    lib = load(name)
    xp, x = lib.xp, scree.Array.unchecked(lib.f(2, 2, 4), lib.i([0, 0, 0]), 0, 1)
    for f in (xp.sort, xp.argsort, xp.cumulative_sum):
        assert f(x, axis=1).shape == x.shape
    assert np.asarray(xp.sum(x, axis=1)).tolist() == np.zeros((2, 2, 4)).tolist()
    assert scree.attention(x, x, x, causal=True).shape == x.shape


@pytest.mark.parametrize("name", [name for name in LIBRARIES if name == "torch"])
def test_cross_entropy_with_a_tail_checks_classes_of_rows(name: str) -> None:
    lib = load(name)
    logits = scree.Array.unchecked(lib.f(5, 4), lib.i([0, 2, 3]), 0, 2)
    with pytest.raises(ValueError, match=r"targets: expected 0 <= class < 4, .* got 4 for token 2"):
        scree.cross_entropy(logits, logits.with_values(lib.i([0, 1, 4, 9, 9])))


@pytest.mark.parametrize("name", NAMES)
def test_add_of_arrays_with_different_tails_raises(name: str) -> None:
    lib = load(name)
    x, y = (scree.Array.unchecked(lib.f(n), lib.i([0, 2, 3]), 0, 2) for n in (5, 4))
    with pytest.raises(ValueError, match="add: expected rows of equal lengths, got 5 and 4 tokens"):
        _ = x + y


@pytest.mark.parametrize("name", [name for name in NAMES if name != "mlx"])
def test_array_with_a_tail_is_refused_where_offsets_are_free_to_read(name: str) -> None:
    lib = load(name)
    with pytest.raises(ValueError, match=r"offsets: expected to end at 5, .* got 3"):
        scree.Array(lib.f(5), lib.i([0, 2, 3]))
