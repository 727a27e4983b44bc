"""Random numbers of attention dropout: Philox-4x32 with 7 rounds (Salmon et al., 2011).

A random number is a function of the seed and of the place in the batch, so every implementation
finds the same numbers again, in any order, in the backward pass too. One call of Philox gives the
numbers of 8 pairs of a query and a key.

=========  ==========================================================================
word       content
=========  ==========================================================================
key        the lower and the upper 32 bits of the seed
counter 0  bits 0 to 2 and from 4 on of the query's position in its row
counter 1  bits 1, 2 and from 4 on of the key's position in its row
counter 2  number of queries before the row
counter 3  head of the query
=========  ==========================================================================

Bit 3 of the query selects words 0 and 1 of the result, or words 2 and 3. Bit 3 of the key selects
the word in this half, and bit 0 of the key its lower or upper 16 bits. The Triton kernels hold such
8 pairs in one thread.
"""

from __future__ import annotations

from typing import Any

from .. import checks
from ..array import Array
from ..backends import Backend, is_array
from ..layout import Layout

ROUNDS = 7
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
#: Probabilities are multiples of 1 / RESOLUTION.
RESOLUTION = 1 << 16
#: Consecutive keys, from a multiple of it on, whose pairs with one query share few calls.
KEY_SPAN = 16


def threshold(dropout: float) -> int:
    """Return the number of the 2**16 random numbers that drop a pair: the rounded probability."""
    return min(round(dropout * RESOLUTION), RESOLUTION - 1)


def round_probability(dropout: float) -> float:
    """Return the multiple of 2**-16 that `dropout` is rounded to."""
    return threshold(dropout) / RESOLUTION


def as_seed(seed: Any, like: Array) -> Any:
    """Return the seed as an array on the device of `like`.

    It has shape (1,) and dtype int64 in a library without arithmetic of uint32, else shape (2,) and
    dtype uint32, the lower word first.
    """
    lib, device = like.layout.backend, like.layout.device
    xp = lib.xp
    word_dtype = getattr(xp, lib.word_dtype)
    if seed is None:
        raise TypeError(
            "seed: expected an integer or an integer array with dropout, got None; draw a new one per "
            "layer and step"
        )
    if not is_array(seed):
        number = checks.check_integer("seed", seed, 0, 1 << 63)
        if lib.word_dtype == "int64":
            return xp.full((1,), number, dtype=word_dtype, device=device)
        words = (xp.full((1,), x, dtype=word_dtype, device=device) for x in split_words(number))
        return xp.concat([*words])
    checks.check_dense("seed", seed, like.values)
    if not xp.isdtype(seed.dtype, "integral") or tuple(seed.shape) not in ((), (1,)):
        raise ValueError(
            f"seed: expected an integer, or an integer array of one element, got shape "
            f"{tuple(seed.shape)} and {seed.dtype}"
        )
    seed = xp.reshape(seed, (1,))
    if lib.word_dtype == "int64":
        return xp.astype(seed, word_dtype, copy=False)
    is_wide = xp.iinfo(seed.dtype).bits == 64
    low, high = split_words(seed) if is_wide else (seed, xp.zeros_like(seed))
    return xp.concat([xp.astype(x, word_dtype) for x in (low, high)])


def split_words(seed: Any) -> tuple[Any, Any]:
    """Return the lower and the upper 32 bits of a number of 64 bits."""
    return seed & WORD, (seed >> 32) & WORD


def multiply(x: Any, factor: int) -> tuple[Any, Any]:
    """Return the upper and the lower 32 bits of products of 32-bit numbers.

    No intermediate result exceeds 32 bits, so the dtype may be uint32 or int64.
    """
    x_low, x_high = x & 0xFFFF, x >> 16
    low, high = factor & 0xFFFF, factor >> 16
    product, middle, other = x_low * low, x_high * low, x_low * high
    carry = (product >> 16) + (middle & 0xFFFF) + (other & 0xFFFF)
    upper = x_high * high + (middle >> 16) + (other >> 16) + (carry >> 16)
    return upper, ((carry & 0xFFFF) << 16) | (product & 0xFFFF)


def add(x: Any, term: int) -> Any:
    """Return sums of 32-bit numbers modulo 2**32."""
    # JAX takes no Python integers from 2**31 on.
    x = x + term // 2 + (term - term // 2)
    return (((x >> 16) & 0xFFFF) << 16) | (x & 0xFFFF)


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Return four random words for each of the counters, whose shapes broadcast together.

    Words are numbers of 32 bits in arrays of uint32 or int64.
    """
    c0, c1, c2, c3 = counter
    for i in range(ROUNDS):
        k0, k1 = (add(x, i * step & WORD) for x, step in zip(key, KEY_STEPS, strict=True))
        upper0, lower0 = multiply(c0, MULTIPLIERS[0])
        upper2, lower2 = multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = upper2 ^ c1 ^ k0, lower2, upper0 ^ c3 ^ k1, lower0
    return c0, c1, c2, c3


def kept_pairs(
    layout: Layout,
    seed: Any,
    dropout: float,
    queries: Any,
    first_keys: Any,
    row_starts: Any,
    num_heads: int,
    num_keys: int,
) -> Any:
    """Return whether dropout keeps pairs of keys and queries, (tiles, num_heads, num_keys, size).

    Parameters
    ----------
    layout
        The rows of the queries, or any layout on their device.
    seed
        Result of `as_seed`.
    dropout
        Probability of a pair to be dropped.
    queries
        (tiles, size) positions of the queries in their rows; negative ones have no meaning.
    first_keys
        (tiles,) positions of the first keys of the tiles, multiples of `KEY_SPAN`.
    row_starts
        (tiles,) numbers of queries before the rows of the tiles.
    num_heads
        Number of query heads.
    num_keys
        Number of consecutive keys, a multiple of `KEY_SPAN`.
    """
    xp, lib = layout.xp, layout.backend
    word_dtype, (tiles, size) = getattr(xp, lib.word_dtype), queries.shape

    def word(x: Any, shape: tuple[int, ...]) -> Any:
        return xp.reshape(xp.astype(x, word_dtype, copy=False), shape)

    queries = xp.where(queries >= 0, queries, 0)
    is_upper = xp.reshape(((queries >> 3) & 1) == 1, (tiles, 1, 1, size))
    counter = (
        word((queries & 7) | ((queries >> 4) << 3), (tiles, 1, 1, size)),
        word(first_keys[:, None] // 4 + layout.arange(num_keys // 4)[None, :], (tiles, 1, -1, 1)),
        word(row_starts, (tiles, 1, 1, 1)),
        word(layout.arange(num_heads), (1, num_heads, 1, 1)),
    )
    w0, w1, w2, w3 = philox(counter, _key(lib, seed))
    shape, limit = (tiles, num_heads, num_keys // KEY_SPAN, 4, size), threshold(dropout)
    by_bit3 = []
    for x in (xp.where(is_upper, w2, w0), xp.where(is_upper, w3, w1)):
        by_bit0 = [xp.reshape(half >= limit, shape) for half in (x & 0xFFFF, x >> 16)]
        by_bit3.append(xp.stack(by_bit0, axis=4))
    return xp.reshape(xp.stack(by_bit3, axis=3), (tiles, num_heads, num_keys, size))


def _key(lib: Backend, seed: Any) -> tuple[Any, Any]:
    """Return the key of Philox from a result of `as_seed`."""
    return split_words(seed) if lib.word_dtype == "int64" else (seed[:1], seed[1:])
