"""Bad input, on every library.

The error is scree's own, names the argument, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from libraries import NAMES, SmallArrays, load

import scree
from scree.data import chunk, truncate

ROWS = [2, 0, 3]


Token = tuple[int, ...]


def qkv(
    lib: SmallArrays, q: Token = (2, 4), k: Token = (2, 4), v: Token = (2, 4), **options: Any
) -> Any:
    """Attention of arrays whose tokens have these shapes."""
    return scree.attention(*(lib.r(ROWS, *token) for token in (q, k, v)), **options)


Case = tuple[
    Callable[[SmallArrays], Any], type[Exception] | tuple[type[Exception], ...], tuple[str, ...]
]

#: Call -> error and what its message holds. Names that end in a star read values, which MLX does
#: not give away for free.
CASES: dict[str, Case] = {
    # ------------------------------------------------------------------------------------------------
    # the array
    "offsets fall*": (lambda x: scree.from_offsets(x.f(5), x.i([0, 3, 2, 5])), ValueError,
                      ("offsets: expected to never fall", "offsets[1] = 3 and offsets[2] = 2", "from_lengths")),
    "offsets start late*": (lambda x: scree.from_offsets(x.f(5), x.i([1, 3, 5])), ValueError,
                            ("offsets: expected to start at 0, got 1", "subtract offsets[0]")),
    "offsets end early*": (lambda x: scree.from_offsets(x.f(5), x.i([0, 2, 4])), ValueError,
                           ("offsets: expected to end at 5", "got 4", "cut the values or add a row")),
    "offsets end late*": (lambda x: scree.from_offsets(x.f(5), x.i([0, 2, 9])), ValueError, ("expected to end at 5", "got 9")),
    "offsets float": (lambda x: scree.from_offsets(x.f(5), x.f(2)), TypeError,
                      ("offsets: expected int32 or int64", "float32", "astype")),
    "offsets narrow": (lambda x: scree.from_offsets(x.f(5), x.i([0, 5], "int16")), TypeError, ("int32 or int64", "int16")),
    "offsets 2-D": (lambda x: scree.from_offsets(x.f(5), x.i([[0, 5]])), ValueError, ("offsets: expected one axis", "(1, 2)")),
    "offsets empty": (lambda x: scree.from_offsets(x.f(5), x.i([])), ValueError,
                      ("offsets:", "(0,)", "an empty batch has [0]")),
    "offsets of no rows": (lambda x: scree.from_offsets(x.f(5), x.i([0])), ValueError,
                           ("offsets: expected rows for 5 tokens, got none",)),
    "offsets a list": (lambda x: scree.from_offsets(x.f(5), [0, 5]), TypeError, ("offsets: expected a dense array", "list")),
    "offsets of another library": (lambda x: scree.from_offsets(x.f(5), x.other.i([0, 5])), TypeError,
                                   ("offsets: expected a dense array of {lib}, got one of {other}", "asarray")),
    "values a list": (lambda x: scree.from_offsets([1, 2], x.i([0, 2])), TypeError, ("values: expected a dense array", "list")),
    "values ragged": (lambda x: scree.from_offsets(x.r(ROWS), x.i([0, 5])), TypeError, ("values: expected a dense", "Array")),
    "values 0-D": (lambda x: scree.from_offsets(x.f(), x.i([0, 1])), ValueError, ("values: expected at least one axis",)),
    **{f"ragged_dim {dim!r}, {name}": (lambda x, f=f, dim=dim: f(x, dim), error, (message, f"got {dim!r}"))
       for dim, error, message in ((-1, ValueError, "ragged_dim: expected 0 <= ragged_dim < 2, the axes of"),
                                   (2, ValueError, "ragged_dim: expected 0 <= ragged_dim < 2, the axes of"),
                                   (True, TypeError, "ragged_dim: expected a Python integer"),
                                   (1.0, TypeError, "ragged_dim: expected a Python integer"))
       for name, f in {
           "Array": lambda x, dim: scree.Array(x.f(5, 5), x.i([0, 5]), dim),
           "lengths": lambda x, dim: scree.from_lengths(x.f(5, 5), [5], ragged_dim=dim),
           "ids": lambda x, dim: scree.from_segment_ids(x.f(3, 3), x.i([0, 0, 1]), 2, ragged_dim=dim),
           "pack": lambda x, dim: scree.pack([x.f(5, 2)], ragged_dim=dim),
           "padded": lambda x, dim: scree.from_padded(x.f(2, 3, 2), lengths=[1, 1], ragged_dim=dim)}.items()},
    "max_length negative": (lambda x: scree.Array(x.f(5), x.i([0, 5]), 0, -1), ValueError,
                            ("max_length: expected at least 0, got -1",)),
    "max_length too small*": (lambda x: scree.Array(x.f(5), x.i([0, 2, 5]), 0, 2), ValueError,
                              ("max_length: expected at least 3, the longest row, got 2",)),
    "max_length too small for known lengths": (lambda x: scree.from_lengths(x.f(5), [2, 3], max_length=2), ValueError,
                                               ("max_length: expected at least 3, the longest row, got 2",)),
    "max_length float": (lambda x: scree.Array(x.f(5), x.i([0, 5]), 0, 5.0), TypeError,
                         ("max_length: expected a Python", "5.0")),
    "max_length bool": (lambda x: scree.Array(x.f(5), x.i([0, 5]), 0, True), TypeError, ("max_length:", "got True")),
    "max_length an array": (lambda x: scree.Array(x.f(5), x.i([0, 5]), 0, x.i(5)), TypeError, ("max_length:", "use int(...)")),
    "validate": (lambda x: scree.Array(x.f(5), x.i([0, 3, 2, 5])).validate(), ValueError, ("offsets: expected to never fall",)),
    "with_values too few": (lambda x: x.r(ROWS).with_values(x.f(4)), ValueError, ("values: expected 5 tokens", "(4,)")),
    "with_values a list": (lambda x: x.r(ROWS).with_values([1.0] * 5), TypeError, ("values: expected a dense array", "list")),
    "with_values of another library": (lambda x: x.r(ROWS).with_values(x.other.f(5)), TypeError, ("values:", "one of {other}")),
    "with_values along no axis": (lambda x: x.r(ROWS).with_values(x.f(5), ragged_dim="0"), TypeError,
                                  ("ragged_dim: expected a Python integer, got '0'",)),
    "mT of one axis": (lambda x: x.r(ROWS).mT, ValueError, ("mT: expected at least two axes", "(3, None)")),
    "a stream": (lambda x: x.r(ROWS).to_device(x.r(ROWS).device, stream=1), ValueError, ("stream: expected None",)),
    "truth": (lambda x: bool(x.r(ROWS)), TypeError, ("truth value of a ragged array is ambiguous", "xp.any or xp.all")),
    "contains": (lambda x: 3.0 in x.r(ROWS), TypeError, ("no `in`", "xp.any(arr == value)")),
    "hash": (lambda x: hash(x.r(ROWS)), TypeError, ("unhashable type: 'Array'",)),
    "change": (lambda x: x.r(ROWS).__setitem__(0, 1), TypeError, ("does not change", "scree.at(arr)[...].set(value)")),
    "as NumPy": (lambda x: np.asarray(x.r(ROWS)), TypeError, ("not a NumPy array", "arr.values", "scree.to_padded")),
    # -------------------------------------------------------------------------------------------------
    # creation
    "pack nothing": (lambda x: scree.pack([]), ValueError, ("arrays: expected at least one array", "from_lengths(values, [])")),
    "pack a number": (lambda x: scree.pack(5), TypeError, ("arrays: expected a sequence of arrays, got int",)),
    "pack lists": (lambda x: scree.pack([[1.0], [2.0]]), TypeError, ("arrays[0]: expected a dense array", "list", "from_lists")),
    "pack ragged": (lambda x: scree.pack([x.r(ROWS)]), TypeError, ("arrays[0]: expected a dense array", "Array")),
    "pack 0-D": (lambda x: scree.pack([x.f()]), ValueError, ("arrays[0]: expected at least one axis",)),
    "pack dtypes": (lambda x: scree.pack([x.f(2), x.f(1), x.i([1, 2])]), TypeError,
                    ("arrays[2]: expected the dtype of arrays[0]", "float32", "int32")),
    "pack libraries": (lambda x: scree.pack([x.f(2), x.other.f(2)]), TypeError,
                       ("arrays[1]: expected the library of arrays[0], {lib}, got {other}",)),
    "pack a list among arrays": (lambda x: scree.pack([x.f(2), [1.0]]), TypeError, ("arrays[1]: expected the library", "list")),
    "pack shapes": (lambda x: scree.pack([x.f(2, 3), x.f(1, 3), x.f(2, 4)]), ValueError,
                    ("arrays[2]: expected the shape without axis 0 of arrays[0], (3,), got (4,)", "ragged_dim may differ")),
    "pack axes": (lambda x: scree.pack([x.f(2, 3), x.f(2)]), ValueError,
                  ("arrays[1]: expected the number of axes", "2, got 1")),
    "pack nothing of one axis": (lambda x: scree.pack([x.f(2, 3), x.f(0)]), ValueError,
                                 ("arrays[1]: expected the number of axes of arrays[0], 2, got 1",)),
    "lengths negative": (lambda x: scree.from_lengths(x.f(5), [6, -1]), ValueError,
                         ("lengths: expected no negative", "-1 at 1")),
    "lengths too few": (lambda x: scree.from_lengths(x.f(5), [2, 2]), ValueError, ("lengths: expected a sum of 5", "got 4")),
    "lengths too many": (lambda x: scree.from_lengths(x.f(5), [2, 9]), ValueError, ("lengths: expected a sum of 5", "got 11")),
    "lengths float": (lambda x: scree.from_lengths(x.f(5), x.f(5)), TypeError, ("lengths: expected", "integers", "float32")),
    "lengths 2-D": (lambda x: scree.from_lengths(x.f(5), x.i([[2, 3]])), TypeError, ("lengths: expected one axis", "(1, 2)")),
    "lengths uneven": (lambda x: scree.from_lengths(x.f(5), [[2], [3, 0]]), TypeError,
                       ("lengths: expected a list of numbers",)),
    "lengths a number": (lambda x: scree.from_lengths(x.f(5), 5), TypeError, ("lengths: expected an array or a list", "int")),
    "ids fall*": (lambda x: scree.from_segment_ids(x.f(3), x.i([0, 2, 1]), 3), ValueError,
                  ("segment_ids: expected ids that never fall, got 2 before 1", "scree.group")),
    "ids fall, read": (lambda x: scree.from_segment_ids(x.f(3), x.i([0, 2, 1])), ValueError, ("segment_ids:", "never fall")),
    "ids negative": (lambda x: scree.from_segment_ids(x.f(3), x.i([-1, 0, 1])), ValueError,
                     ("segment_ids:", "at least 0", "-1")),
    "ids beyond*": (lambda x: scree.from_segment_ids(x.f(3), x.i([0, 1, 5]), 3), ValueError,
                    ("segment_ids:", "below num_segments, 3", "got 0 to 5")),
    "ids float": (lambda x: scree.from_segment_ids(x.f(3), x.f(3)), TypeError, ("segment_ids: expected integers", "float32")),
    "ids a list": (lambda x: scree.from_segment_ids(x.f(3), [0, 0, 1]), TypeError, ("segment_ids: expected a dense array",)),
    "ids too few": (lambda x: scree.from_segment_ids(x.f(3), x.i([0, 0])), ValueError, ("expected shape (3,), one id per token")),
    "num_segments": (lambda x: scree.from_segment_ids(x.f(1), x.i([0]), -1), ValueError,
                     ("num_segments: expected at least 0",)),
    "num_segments float": (lambda x: scree.from_segment_ids(x.f(1), x.i([0]), 2.0), TypeError,
                           ("num_segments: expected a Py",)),
    "mask shape": (lambda x: scree.from_padded(x.f(2, 3), x.b([[True] * 4] * 2)), ValueError,
                   ("mask: expected shape (2, 3)", "got (2, 4)")),
    "lengths for a mask": (lambda x: scree.from_padded(x.f(2, 3), x.i([1, 2])), ValueError,
                           ("mask: expected shape (2, 3)", "got (2,); lengths are given as lengths=")),
    "mask float": (lambda x: scree.from_padded(x.f(2, 3), x.f(2, 3)), TypeError,
                   ("mask: expected booleans or integers", "float")),
    "mask and lengths": (lambda x: scree.from_padded(x.f(2, 3), x.b([[True] * 3] * 2), lengths=[1, 1]), ValueError,
                         ("mask: expected either mask or lengths, got both",)),
    "no mask": (lambda x: scree.from_padded(x.f(2, 3)), ValueError, ("mask: expected either mask or lengths, got neither",)),
    "padded 1-D": (lambda x: scree.from_padded(x.f(3), lengths=[1]), ValueError,
                   ("padded: expected at least two axes", "(3,)")),
    "padded a list": (lambda x: scree.from_padded([[1]], lengths=[1]), TypeError, ("padded: expected a dense array",)),
    "padded lengths too long": (lambda x: scree.from_padded(x.f(2, 3), lengths=[1, 4]), ValueError,
                                ("lengths: expected lengths in [0, 3], got 1 to 4",)),
    "padded lengths negative": (lambda x: scree.from_padded(x.f(2, 3), lengths=[1, -1]), ValueError, ("in [0, 3], got -1",)),
    "padded lengths shape": (lambda x: scree.from_padded(x.f(2, 3), lengths=[1]), ValueError, ("expected shape (2,)", "(1,)")),
    "padded total": (lambda x: scree.from_padded(x.f(2, 3), lengths=[1, 1], total=3), ValueError,
                     ("total: expected 2", "got 3")),
    "padded lengths float": (lambda x: scree.from_padded(x.f(2, 3), lengths=[1.0, 1.0]), TypeError, ("lengths:", "float64")),
    "to_padded too short": (lambda x: scree.to_padded(x.r(ROWS), length=2), ValueError,
                            ("length: expected at least 3, the longest row, got 2", "arr[:, :length]")),
    "to_padded negative": (lambda x: scree.to_padded(x.r([]), length=-1), ValueError, ("length: expected at least 0, got -1",)),
    "to_padded float": (lambda x: scree.to_padded(x.r(ROWS), length=4.0), TypeError, ("length: expected a Python integer",)),
    "to_padded side": (lambda x: scree.to_padded(x.r(ROWS), side="top"), ValueError,
                       ("side: expected 'right' or 'left'", "'top'")),
    **{f"{f.__name__}, {value} for integers": (lambda x, f=f, value=value: f(x.r(ROWS, dtype="int32"), fill_value=value),
                                               TypeError, ("fill_value: expected a number that", "int32 holds", f"got {value}"))
       for f in (scree.to_padded, scree.bucket) for value in (0.5, float("nan"), 2**31)},
    "to_padded fill": (lambda x: scree.to_padded(x.r(ROWS), fill_value=x.f(1)), TypeError, ("fill_value: expected a scalar",)),
    **{f"{name} of a dense array": (lambda x, f=f: f(x.f(5)), TypeError, ("arr: expected a ragged array", "scree.pack"))
       for name, f in {"to_backend": lambda arr: scree.bridges.to_backend(arr, "numpy"), "chunk": lambda arr: chunk(arr, 2),
                       "truncate": lambda arr: truncate(arr, 2)}.items()},
    **{f"{f.__name__} of a dense array": (lambda x, f=f: f(x.f(5)), TypeError, ("arr: expected a ragged array", "scree.pack"))
       for f in (scree.unpack, scree.to_padded, scree.segment_ids, scree.positions, scree.at, scree.bucket)},
    # -------------------------------------------------------------------------------------------------
    # indexing
    "row": (lambda x: x.r(ROWS)[3], IndexError, ("index: expected a row in [-3, 3), got 3",)),
    "row from the end": (lambda x: x.r(ROWS)[-4], IndexError, ("index: expected a row in [-3, 3), got -4",)),
    "token of a row": (lambda x: x.r(ROWS)[0, 2], IndexError, ("index: expected a number in [-2, 2) on axis 1", "got 2")),
    "token of rows": (lambda x: x.r(ROWS)[:, -3], IndexError, ("rows of at least 3 tokens for [:, -3]", "shorter rows: 0, 1")),
    "token of many rows": (lambda x: x.r([0] * 9)[:, 0], IndexError, ("shorter rows: 0, 1, 2, 3, 4 ...",)),
    "element": (lambda x: x.r(ROWS, 4)[..., 4], IndexError, ("index: expected a number in [-4, 4) on axis 2 of (3, None, 4)",)),
    "elements*": (lambda x: x.r(ROWS, 4)[..., x.i([0, -5])], IndexError, ("in [-4, 4) on axis 2", "got -5 to 0")),
    "mask of elements": (lambda x: x.r(ROWS, 4)[..., x.b([True])], IndexError, ("a mask of 4 entries on axis 2", "got 1")),
    "float elements": (lambda x: x.r(ROWS, 4)[..., x.f(2)], TypeError, ("index: expected integers or booleans", "float32")),
    "rows": (lambda x: x.r(ROWS)[x.i([0, 3])], IndexError, ("index: expected numbers in [-3, 3), the rows, got 0 to 3",)),
    "float rows": (lambda x: x.r(ROWS)[x.f(2)], IndexError, ("one axis of integers or booleans", "float32")),
    "mask of rows": (lambda x: x.r(ROWS)[x.b([True])], IndexError, ("a mask of shape (3,), one entry per row, got (1,)",)),
    "a name": (lambda x: x.r(ROWS)["a"], TypeError, ("index: expected an integer, a slice or an array of rows, got str",)),
    "truth as a row": (lambda x: x.r(ROWS)[True], TypeError, ("index: expected an integer", "bool")),
    **{f"{key} as a number {where}": (lambda x, i=i, k=k: x.r(ROWS, 4)[(*i, k(x))], (IndexError, TypeError), ("index: expected ",))
       for key, k in {"0-D truth": lambda x: x.b(True), "0-D float": lambda x: x.f()}.items()
       for where, i in {"of a row": (), "of a token": (slice(None),), "of an element": (...,)}.items()},
    "list of tokens": (lambda x: x.r(ROWS)[:, [0]], TypeError, ("an integer or a slice on the ragged axis", "list")),
    "float slice": (lambda x: x.r(ROWS)[:, :1.5], TypeError, ("index: expected integers in a slice", "1.5")),
    "slice without step": (lambda x: x.r(ROWS)[:, ::0], ValueError, ("index: expected a slice step other than 0",)),
    "too many": (lambda x: x.r(ROWS)[:, :, 0], IndexError, ("at most 2 entries", "(3, None)", "got 3")),
    "axis before the batch": (lambda x: x.r(ROWS)[None], ValueError, ("no new axis before the batch",)),
    **{f"{function}({keyword})": (lambda x, f=function, k=keyword: getattr(x.xp, f)(x.r(ROWS), **{k: 1}), TypeError,
                                  (f"{keyword}: expected ", f"for {function} of a ragged array"))
       for function, keywords in {"sum": "initial where out", "mean": "where dtype", "prod": "initial", "max": "initial",
                                  "min": "where", "var": "ddof", "std": "ddof dtype", "any": "where", "exp": "where out",
                                  "clip": "out", "count_nonzero": "dtype"}.items() for keyword in keywords.split()},
    "ragged mask, other rows": (lambda x: x.r(ROWS)[x.r([3, 0, 2]) > 0], IndexError, ("a mask with the rows of the array",)),
    "ragged mask, other rows, read": (lambda x: scree.Array(x.f(5), x.i([0, 2, 5]))[scree.Array(x.b([True] * 5), x.i([0, 3, 5]))],
                                      IndexError, ("a mask with the rows of the array",)),
    "ragged mask among others": (lambda x: x.r(ROWS)[x.r(ROWS) > 0, 0], TypeError, ("ragged mask", "alone")),
    "positions beyond*": (lambda x: x.r(ROWS)[x.r([1, 1, 1], dtype="int32")], IndexError, ("positions within the rows",)),
    "positions float": (lambda x: x.r(ROWS)[x.r([1, 0, 1])], TypeError, ("index: expected integers", "float32")),
    "positions, other batch": (lambda x: x.r(ROWS)[x.r([1], dtype="int32")], IndexError, ("positions (3, None)", "(1, None)")),
    "update shape": (lambda x: scree.at(x.r(ROWS))[:, :1].set(x.f(7)), ValueError, ("value: shape (7,)", "(3, None)")),
    "update row": (lambda x: scree.at(x.r(ROWS))[0].set(x.f(3)), ValueError, ("value: expected it to fit", "(2,), got (3,)")),
    "update dtype": (lambda x: scree.at(x.r(ROWS))[0].set(x.i([1, 2])), TypeError,
                     ("value: expected the dtype of the array", "float32", "int32")),
    "update loses": (lambda x: scree.at(x.r(ROWS, dtype="int32"))[0].add(0.5), TypeError,
                     ("value: expected a number that", "0.5")),
    "update rows": (lambda x: scree.at(x.r(ROWS))[:2].set(x.r([1, 1])), ValueError,
                    ("value: expected rows of equal lengths", "2 and 1 tokens")),
    "update axes": (lambda x: scree.at(x.r(ROWS, 5))[:].set(x.r(ROWS)), ValueError,
                    ("value: expected ragged arrays with the same axes", "(3, None, 5) and (3, None)")),
    # -------------------------------------------------------------------------------------------
    # fitting together
    "other rows": (lambda x: x.r(ROWS) + x.r([3, 0, 2]), ValueError,
                   ("add: expected rows of equal lengths", "2 and 3", "row 0")),
    "other batch": (lambda x: x.r(ROWS) + x.r([5]), ValueError, ("add: expected rows of equal lengths, got 3 and 1 rows",)),
    "other axes": (lambda x: x.r(ROWS) + x.r(ROWS, 4), ValueError, ("with the same axes", "(3, None, 4)", "with_values")),
    "compared": (lambda x: x.r(ROWS) == x.r([3, 0, 2]), ValueError, ("equal: expected rows of equal lengths",)),
    "row-wise": (lambda x: x.r(ROWS) + x.f(3), ValueError,
                 ("add: shape (3,) does not broadcast, aligned right, with (3, None)", "v[:, None] has one entry per row")),
    "row-wise elements": (lambda x: x.r(ROWS, 4) + x.f(3), ValueError, ("v[:, None, None] has one entry per row",)),
    "dense tokens": (lambda x: x.r(ROWS) + x.f(3, 2), ValueError, ("shape (3, 2) does not broadcast", "(3, None)")),
    "dense batch": (lambda x: x.r(ROWS) + x.f(2, 1), ValueError, ("shape (2, 1) does not broadcast", "(3, None)")),
    "dense elements": (lambda x: x.r(ROWS, 4) + x.f(3, 1, 3), ValueError, ("shape (3, 1, 3) does not broadcast",)),
    **{f"{operand!r} as an operand": (lambda x, y=operand: x.xp.add(x.r(ROWS), y), TypeError,
                                      (f"add: expected an array or a Python scalar, got {type(operand).__name__}", "asarray"))
       for operand in ([1.0] * 5, "1", {})},
    "0-D of another library": (lambda x: x.r(ROWS) + x.other.f(), TypeError, ("add: expected a dense array of {lib}, got one of",)),
    "where of a list": (lambda x: x.xp.where(x.r(ROWS) > 0, x.r(ROWS), [1.0] * 5), TypeError, ("where: expected an array or",)),
    "dense of another library": (lambda x: x.r(ROWS) + x.other.f(1), TypeError, ("add: expected a dense array of {lib}",)),
    "ragged of another library": (lambda x: x.r(ROWS) + x.other.r(ROWS), TypeError, ("of {lib}, got one of {other}",)),
    "align": (lambda x: scree.align(x.r(ROWS), like=x.r([3, 0, 2])), ValueError, ("arr: expected the rows of like", "2 and 3")),
    "align a dense array": (lambda x: scree.align(x.f(5), like=x.r(ROWS)), TypeError, ("arr: expected a ragged array",)),
    "where": (lambda x: x.xp.where(x.r(ROWS) > 0, x.r(ROWS), x.r([3, 0, 2])), ValueError, ("where: expected rows of equal",)),
    "concat rows": (lambda x: x.xp.concat([x.r(ROWS), x.r([5])], axis=1), ValueError, ("the same number of rows, got 3, 1",)),
    "concat elements": (lambda x: x.xp.concat([x.r(ROWS, 4), x.r(ROWS, 3)], axis=1), ValueError,
                        ("arrays[1]: expected the element axes of arrays[0], (3, None, 4), got (3, None, 3)",)),
    "concat other rows": (lambda x: x.xp.concat([x.r(ROWS, 4), x.r([3, 0, 2], 4)], axis=2), ValueError,
                          ("concat: expected rows",)),
    "concat a dense array": (lambda x: x.xp.concat([x.r(ROWS), x.f(5)], axis=1), TypeError,
                             ("arrays[1]: expected a ragged array",)),
    "stack other rows": (lambda x: x.xp.stack([x.r(ROWS), x.r([3, 0, 2])], axis=1), ValueError, ("stack: expected rows of",)),
    "stack the batch": (lambda x: x.xp.stack([x.r(ROWS), x.r(ROWS)], axis=0), ValueError,
                        ("axis: the batch is axis 0", "concat")),
    **{f"{name} along {axis!r}": (lambda x, name=name, axis=axis: getattr(x.xp, name)(x.r(ROWS), axis=axis),
                                  ValueError, message)
       for name in ("sum", "var", "cumulative_sum", "sort", "argmax", "flip", "diff", "unstack")
       for axis, message in ((2, (f"axis: expected {name} along axes in [-2, 2), got 2",)), (-3, ("[-2, 2), got -3",)),
                             (1.0, ("got 1.0",)), (True, ("got True",)), ((0, 0), ("axis: expected every axis once",)))},
    "sum of the batch": (lambda x: x.xp.sum(x.r(ROWS), axis=0), ValueError, ("axis: sum over the batch alone", "axis=(0, 1)")),
    **{f"{name} of complex numbers": (lambda x, name=name: getattr(x.xp, name)(x.r(ROWS, dtype="complex64"), axis=1), TypeError,
                                      (f"x: expected real numbers for {name}, got ", "xp.abs"))
       for name in ("max", "min", "std", "var", "sort", "argsort", "argmax", "argmin")},
    "sort along two": (lambda x: x.xp.sort(x.r(ROWS, 4), axis=(1, 2)), ValueError, ("axis: expected one axis for sort", "(1, 2)")),
    "sort of the batch": (lambda x: x.xp.sort(x.r(ROWS), axis=0), ValueError,
                          ("axis: sort works within each row", "axis 0")),
    "scan of everything": (lambda x: x.xp.cumulative_sum(x.r(ROWS, 2)), ValueError,
                           ("axis: expected one axis for cumulative_sum",)),
    "broadcast_to": (lambda x: x.xp.broadcast_to(x.r(ROWS, 4), (3, None, 5)), ValueError, ("shape: expected a shape to which",)),
    "reshape": (lambda x: x.xp.reshape(x.r(ROWS, 4), (3, None, 5)), ValueError, ("shape: expected 4 elements", "(3, None, 5)")),
    "reshape without rows": (lambda x: x.xp.reshape(x.r(ROWS, 4), (20,)), ValueError, ("shape: expected (3, ..., None, ...)",)),
    "squeeze": (lambda x: x.xp.squeeze(x.r(ROWS, 4), axis=2), ValueError, ("axis: expected element axes of size 1",)),
    "expand_dims": (lambda x: x.xp.expand_dims(x.r(ROWS), axis=0), ValueError, ("axis: expand_dims cannot move the batch",)),
    "permute_dims by a number": (lambda x: x.xp.permute_dims(x.r(ROWS, 4), 1), TypeError,
                                 ("axes: expected a tuple of 3 axes, got 1",)),
    "correction": (lambda x: x.xp.var(x.r(ROWS), axis=1, correction="1"), TypeError, ("correction: expected a Python number",)),
    "to_backend": (lambda x: x.r(ROWS).to_backend("json"), TypeError, ("library: expected one that follows", "'json'")),
    "permute_dims": (lambda x: x.xp.permute_dims(x.r(ROWS, 4), (1, 0, 2)), ValueError, ("axes: expected 0, the batch",)),
    "moveaxis": (lambda x: x.xp.moveaxis(x.r(ROWS, 4), (1, 1), (1, 2)), ValueError, ("source: expected every axis once",)),
    "roll": (lambda x: x.xp.roll(x.r(ROWS), 1.5, axis=1), TypeError, ("shift: expected a Python integer, got 1.5",)),
    "roll shifts": (lambda x: x.xp.roll(x.r(ROWS), (1, 2), axis=1), ValueError, ("shift: expected one for each axis",)),
    "repeat negative": (lambda x: x.xp.repeat(x.r(ROWS), -1, axis=1), ValueError, ("repeats: expected at least 0, got -1",)),
    "repeat counts": (lambda x: x.xp.repeat(x.r(ROWS), x.i([1, 2]), axis=0), ValueError, ("repeats: expected shape (3,)",)),
    "repeat dense": (lambda x: x.xp.repeat(x.r(ROWS), x.i([1] * 5), axis=1), TypeError,
                     ("repeats:", "ragged array for tokens")),
    "tile": (lambda x: x.xp.tile(x.r(ROWS), (1, -1)), ValueError, ("repetitions: expected at least 0, got -1",)),
    "take tokens": (lambda x: x.xp.take(x.r(ROWS), x.i([0]), axis=1), ValueError,
                    ("axis: take along the ragged axis", "gather")),
    "take from a table*": (lambda x: x.xp.take(x.f(3, 2), x.r([9], dtype="int32"), axis=0), IndexError,
                           ("indices: expected numbers in [-3, 3)", "got 0 to 6")),
    "take by float": (lambda x: x.xp.take(x.f(9, 2), x.r(ROWS), axis=0), TypeError, ("indices: expected integers", "float32")),
    "take_along_axis": (lambda x: x.xp.take_along_axis(x.r(ROWS), x.i([0]), axis=1), TypeError,
                        ("indices: expected a ragged",)),
    "take_along_axis of other rows": (lambda x: x.xp.take_along_axis(x.r(ROWS, 4), x.r([3, 0, 2], 1, dtype="int32"), axis=2),
                                      ValueError, ("take_along_axis: expected rows of equal lengths", "2 and 3")),
    "diff from other rows": (lambda x: x.xp.diff(x.r(ROWS, 4), axis=2, prepend=x.r([3, 0, 2], 1)), ValueError,
                             ("expected rows of equal lengths", "3 and 2")),
    "diff negative": (lambda x: x.xp.diff(x.r(ROWS), n=-1), ValueError, ("n: expected at least 0, got -1",)),
    "axis by position": (lambda x: x.xp.sum(x.r(ROWS), 1), TypeError, ("sum() takes 1 positional argument",)),
    "take_along_axis beyond*": (lambda x: x.xp.take_along_axis(x.r(ROWS), x.r([1, 1, 1], dtype="int32"), axis=1), IndexError,
                                ("indices: expected positions within the rows",)),
    "matmul": (lambda x: x.r(ROWS, 4) @ x.f(3, 2), ValueError, ("matmul: expected a matrix (4, m)", "got (3, 2)")),
    "matmul by row": (lambda x: x.r(ROWS, 4) @ x.f(2, 4, 2), ValueError, ("matmul: expected one matrix per row, (3, 4, m)",)),
    "matmul by a number": (lambda x: x.r(ROWS, 4) @ 3, TypeError, ("matmul: expected", "(3, None, 4) and 3")),
    "matmul of rows": (lambda x: x.r(ROWS) @ x.r(ROWS), TypeError, ("matmul: expected", "(3, None)", "scree.to_padded")),
    "tensordot": (lambda x: x.xp.tensordot(x.r(ROWS, 4), x.f(3, 4), axes=1), ValueError, ("axes: expected the last 1 axes",)),
    "matrix of tokens": (lambda x: x.xp.linalg.det(x.r(ROWS, 4)), ValueError, ("x: expected a matrix for each token",)),
    "fft": (lambda x: x.xp.fft.fft(x.r(ROWS)), TypeError, ("fft does not take ragged arrays", "scree.unpack")),
    "from_dlpack": (lambda x: x.xp.from_dlpack(x.r(ROWS)), TypeError,
                    ("from_dlpack does not take ragged arrays", "scree.to_padded")),
    "asarray": (lambda x: x.xp.asarray(x.r(ROWS), dtype=x.xp.int8, copy=False), ValueError,
                ("copy: expected None or True", "got False")),
    # -------------------------------------------------------------------------------------------------
    # xp.ragged
    "attention, dense": (lambda x: scree.attention(x.r(ROWS, 2, 4), *[x.f(5, 2, 4)] * 2), TypeError, ("k: expected a ragged",)),
    "attention, 2-D values": (lambda x: qkv(x, (4,), (4,), (4,)), ValueError,
                              ("q: expected values (total, num_heads, head_dim)", "(5, 4)", "[:, None, :]")),
    "attention, batches": (lambda x: scree.attention(x.r(ROWS, 2, 4), *[x.r([5], 2, 4)] * 2), ValueError,
                           ("k: expected 3 rows as q, got 1",)),
    "attention, rows of k and v": (lambda x: scree.attention(*(x.r(n, 2, 4) for n in (ROWS, ROWS, [3, 0, 2]))), ValueError,
                                   ("k and v: expected rows of equal lengths", "2 and 3 tokens in row 0")),
    "attention, head dims": (lambda x: qkv(x, k=(2, 6)), ValueError, ("k: expected head_dim 4 as q, got 6",)),
    "attention, no head dim": (lambda x: qkv(x, (2, 0), (2, 0)), ValueError, ("q: expected a head_dim of at least 1",)),
    "attention, no heads at all": (lambda x: qkv(x, (0, 4), (0, 4), (0, 4)), ValueError, ("num_heads to be a positive multiple",)),
    "attention, value_dim 0": (lambda x: scree.attention(x.r(ROWS, 2, 4), x.r(ROWS, 2, 4), x.r(ROWS, 2, 0)), ValueError,
                               ("v: expected a head_dim of at least 1",)),
    "broadcast_to two None": (lambda x: x.xp.broadcast_to(x.r(ROWS, 1), (3, None, None)), ValueError,
                              ("shape: expected 3 axes", "(3, None, None)")),
    "0-D index of an element*": (lambda x: x.r(ROWS, 4)[:, :, x.i(9)], IndexError, ("in [-4, 4)", "got 9")),
    "attention, heads": (lambda x: qkv(x, (3, 4)), ValueError, ("num_heads to be a positive multiple of num_kv_heads 2, got 3",)),
    "attention, no heads": (lambda x: qkv(x, k=(0, 4), v=(0, 4)), ValueError, ("num_kv_heads 0, got 2",)),
    "attention, heads of v": (lambda x: qkv(x, v=(1, 4)), ValueError, ("v: expected 2 heads as k, got 1",)),
    "attention, integers": (lambda x: scree.attention(*[x.r(ROWS, 2, 4, dtype="int32")] * 3), TypeError,
                            ("q: expected a real floating-point dtype", "int32")),
    "attention, dtypes": (lambda x: scree.attention(x.r(ROWS, 2, 4), *[x.r(ROWS, 2, 4, dtype="int32")] * 2), TypeError,
                          ("k: expected the dtype of q", "float32", "int32", "xp.astype")),
    "attention, slopes": (lambda x: qkv(x, alibi_slopes=x.f(3)), ValueError, ("alibi_slopes: expected", "(2,)", "got (3,)")),
    "attention, slopes a list": (lambda x: qkv(x, alibi_slopes=[1.0, 2.0]), TypeError, ("alibi_slopes: expected a dense", "list")),
    "attention, dropout 1": (lambda x: qkv(x, dropout=1.0, seed=1), ValueError,
                             ("dropout: expected a probability in [0, 1), got 1.0", "0 for no dropout")),
    "attention, dropout negative": (lambda x: qkv(x, dropout=-0.1, seed=1), ValueError,
                                    ("dropout: expected a probability in [0, 1), got -0.1",)),
    "attention, dropout a flag": (lambda x: qkv(x, dropout=True, seed=1), TypeError,
                                  ("dropout: expected a Python number, got True",)),
    "attention, no seed": (lambda x: qkv(x, dropout=0.1), TypeError,
                           ("seed: expected an integer or an integer array with dropout, got None", "draw a new one")),
    "attention, seed negative": (lambda x: qkv(x, dropout=0.1, seed=-1), ValueError, ("seed: expected 0 <= seed", "got -1")),
    "attention, seed a float": (lambda x: qkv(x, dropout=0.1, seed=1.5), TypeError, ("seed: expected a Python integer, got 1.5",)),
    "attention, two seeds": (lambda x: qkv(x, dropout=0.1, seed=x.i([1, 2])), ValueError,
                             ("seed: expected an integer, or an integer array of one element", "(2,)")),
    "attention, seed of another library": (lambda x: qkv(x, dropout=0.1, seed=x.other.i(1)), TypeError,
                                           ("seed: expected a dense array of {lib}, got one of {other}",)),
    "attention, sinks of another library": (lambda x: qkv(x, sinks=x.other.f(2)), TypeError,
                                            ("sinks: expected a dense array of {lib}, got one of {other}",)),
    "attention, libraries": (lambda x: scree.attention(x.r(ROWS, 2, 4), *[x.other.r(ROWS, 2, 4)] * 2), TypeError,
                             ("k: expected an array of {lib} as q, got {other}",)),
    "window 0": (lambda x: qkv(x, causal=True, window=0), ValueError,
                 ("window: expected at least 1 key, the query's own", "0")),
    "window negative": (lambda x: qkv(x, causal=True, window=-1), ValueError, ("window: expected at least 1 key", "got -1")),
    "window to the right": (lambda x: qkv(x, window=(0, -1)), ValueError,
                            ("window[1]: expected at least 0, or None for no bound, got -1",)),
    "window without causal": (lambda x: qkv(x, window=3), ValueError,
                              ("window: expected (left, right) without causal, got 3",)),
    "window of three": (lambda x: qkv(x, window=(1, 2, 3)), ValueError, ("window: expected (left, right), got (1, 2, 3)",)),
    "window float": (lambda x: qkv(x, causal=True, window=1.5), TypeError, ("window: expected a Python integer, got 1.5",)),
    "softcap 0": (lambda x: qkv(x, softcap=0), ValueError, ("softcap: expected a finite number > 0, got 0",)),
    "softcap text": (lambda x: qkv(x, softcap="1"), TypeError, ("softcap: expected a Python number, got '1'",)),
    "scale NaN": (lambda x: qkv(x, scale=float("nan")), ValueError, ("scale: expected a finite number, got nan",)),
    "scale an array": (lambda x: qkv(x, scale=x.f(1)), TypeError, ("scale: expected a Python number",)),
    **{f"{name} {value!r}": (lambda x, name=name, value=value: qkv(x, **{name: value}), TypeError,
                             (f"{name}: expected True or False, got {value!r}",))
       for name in ("causal", "deterministic", "return_lse") for value in ("False", 1)},
    "kernels": (lambda x: qkv(x, kernel=["triton"]), TypeError, ("kernel: expected the name of a provider", "['triton']")),
    "kernel": (lambda x: qkv(x, kernel="fast"), ValueError, ("kernel: expected one of", "'standard'", "attention, got 'fast'")),
    "softmax of a dense array": (lambda x: scree.softmax(x.f(3)), TypeError, ("x: expected a ragged array", "scree.pack")),
    "softmax of integers": (lambda x: scree.softmax(x.r(ROWS, dtype="int32")), TypeError,
                            ("x: expected a real floating", "int32")),
    "softmax of the batch": (lambda x: scree.softmax(x.r(ROWS, 2), axis=0), ValueError,
                             ("axis: softmax works within each row", "got axis 0")),
    "logsumexp axis": (lambda x: scree.logsumexp(x.r(ROWS, 2), axis=3), ValueError,
                       ("axis: expected softmax along axes in [-3, 3)", "3")),
    "shift of a dense array": (lambda x: scree.shift(x.f(3), 1), TypeError, ("x: expected a ragged array", "scree.pack")),
    "shift float": (lambda x: scree.shift(x.r(ROWS), 1.0), TypeError, ("n: expected a Python integer, got 1.0",)),
    "shift an array": (lambda x: scree.shift(x.r(ROWS), x.i(1)), TypeError, ("n: expected a Python integer", "int(...)")),
    "shift fill_value": (lambda x: scree.shift(x.r(ROWS, dtype="int32"), 1, fill_value=0.5), TypeError,
                         ("fill_value: expected a number that", "int32", "0.5", "xp.astype")),
    "broadcast_rows of a list": (lambda x: scree.broadcast_rows([1, 2, 3], x.r(ROWS)), TypeError,
                                 ("per_row: expected a dense array", "list", "asarray")),
    "broadcast_rows like": (lambda x: scree.broadcast_rows(x.f(3), x.f(5)), TypeError, ("like: expected a ragged array",)),
    "broadcast_rows shape": (lambda x: scree.broadcast_rows(x.f(2, 3), x.r(ROWS)), ValueError,
                             ("per_row: expected shape (3, ...), one entry per row of like, got (2, 3)",)),
    **{f"{name} of integers": (lambda x, name=name: getattr(scree, name)(x.r(ROWS, dtype="int32")), TypeError,
                              ("x: expected a real floating", "int32", "xp.astype")) for name in ("relu", "gelu", "silu", "erf")},
    "silu of a list": (lambda x: scree.silu([1.0]), TypeError, ("x: expected a dense array", "list", "numpy.asarray")),
    "gelu approximate": (lambda x: scree.gelu(x.f(3), approximate="erf"), ValueError,
                         ("approximate: expected 'none' or 'tanh', got 'erf'",)),
    "conv1d of rows": (lambda x: scree.conv1d(x.r(ROWS), x.f(4, 4, 3)), ValueError,
                       ("x: expected a ragged array (n, None, channels)", "(3, None)")),
    "conv1d of integers": (lambda x: scree.conv1d(x.r(ROWS, 4, dtype="int32"), x.f(4, 4, 3)), TypeError,
                           ("x: expected a real floating", "int32")),
    "conv1d weight": (lambda x: scree.conv1d(x.r(ROWS, 4), x.f(4, 3, 2)), ValueError,
                      ("weight: expected shape (out, 4, width)", "torch.nn.Conv1d", "got (4, 3, 2)")),
    "conv1d weight of groups": (lambda x: scree.conv1d(x.r(ROWS, 4), x.f(3, 2, 2), groups=2), ValueError,
                                ("weight: expected shape (out, 2, width) with out a multiple of groups=2", "got (3, 2, 2)")),
    "conv1d weight without width": (lambda x: scree.conv1d(x.r(ROWS, 4), x.f(4, 4, 0)), ValueError, ("at least one position",)),
    "conv1d weight dtype": (lambda x: scree.conv1d(x.r(ROWS, 4), x.i(np.zeros((4, 4, 1)))), TypeError,
                            ("weight: expected the dtype of x", "int32", "xp.astype")),
    "conv1d weight ragged": (lambda x: scree.conv1d(x.r(ROWS, 4), x.r(ROWS, 4)), TypeError, ("weight: expected a dense array",)),
    "conv1d bias": (lambda x: scree.conv1d(x.r(ROWS, 4), x.f(2, 4, 1), x.f(4)), ValueError,
                    ("bias: expected shape (2,), one number per output channel, got (4,)",)),
    "conv1d groups": (lambda x: scree.conv1d(x.r(ROWS, 4), x.f(3, 1, 1), groups=3), ValueError,
                      ("groups: expected a divisor of the 4 channels of x, got 3",)),
    "conv1d padding": (lambda x: scree.conv1d(x.r(ROWS, 4), x.f(4, 4, 1), padding=1), ValueError,
                       ("padding: expected 'causal' or 'same', got 1",)),
    "conv1d dilation": (lambda x: scree.conv1d(x.r(ROWS, 4), x.f(4, 4, 1), dilation=0), ValueError,
                        ("dilation: expected at least 1, got 0",)),
    "loss of rows": (lambda x: scree.cross_entropy(x.r(ROWS), x.r(ROWS)), ValueError,
                     ("logits: expected a ragged array (n, None, size)", "(3, None)")),
    "loss of integers": (lambda x: scree.cross_entropy(x.r(ROWS, 4, dtype="int32"), x.r(ROWS, dtype="int32")), TypeError,
                         ("logits: expected a real floating", "int32", "astype")),
    "loss of no class": (lambda x: scree.cross_entropy(x.r(ROWS, 0), x.r(ROWS, dtype="int32")), ValueError,
                         ("logits: expected at least one class", "(3, None, 0)")),
    "loss of a list": (lambda x: scree.cross_entropy([[1.0]], x.i([0])), TypeError, ("logits: expected a dense array", "list")),
    "targets dense": (lambda x: scree.cross_entropy(x.r(ROWS, 4), x.i([0] * 5)), TypeError, ("targets: expected a ragged array",)),
    "targets ragged": (lambda x: scree.cross_entropy(x.f(5, 4), x.r(ROWS, dtype="int32")), ValueError,
                       ("targets: expected a dense array of shape (5,)", "(3, None)")),
    "targets too few": (lambda x: scree.cross_entropy(x.f(5, 4), x.i([0] * 4)), ValueError, ("(5,), one class per token", "(4,)")),
    "targets of other rows": (lambda x: scree.cross_entropy(x.r(ROWS, 4), x.r([1, 1, 2], dtype="int32")), ValueError,
                              ("targets: ",)),
    "targets with axes": (lambda x: scree.cross_entropy(x.r(ROWS, 4), x.r(ROWS, 4, dtype="int32")), ValueError,
                          ("targets: expected shape (n, None), one class per token", "(3, None, 4)")),
    "targets float": (lambda x: scree.cross_entropy(x.f(5, 4), x.f(5)), TypeError, ("targets: expected integers", "float32")),
    **{f"target {target}*": (lambda x, target=target: scree.cross_entropy(x.f(3, 4), x.i([0, -100, target])), ValueError,
                             ("targets: expected 0 <= class < 4, or ignore_index, -100", f"got {target} for token 2"))
       for target in (4, -1)},
    "reduction": (lambda x: scree.cross_entropy(x.f(1, 4), x.i([0]), reduction="average"), ValueError,
                  ("reduction: expected one of 'mean', 'sum', 'row_mean', 'none'", "got 'average'")),
    "reduction of rows": (lambda x: scree.cross_entropy(x.f(1, 4), x.i([0]), reduction="row_mean"), ValueError,
                          ("reduction: 'row_mean' needs rows", "dense array of shape (1, 4)")),
    "ignore_index": (lambda x: scree.cross_entropy(x.f(1, 4), x.i([0]), ignore_index=None), TypeError,
                     ("ignore_index: expected a Python integer, got None",)),
    **{f"class weights {case}": (
           lambda x, wrong=wrong: scree.cross_entropy(x.f(5, 4), x.i([0] * 5), class_weights=wrong(x)), error, message)
       for case, wrong, error, message in (
           ("of too few classes", lambda x: x.f(3), ValueError,
            ("class_weights: expected shape (4,), one number per class, got (3,)",)),
           ("of integers", lambda x: x.i([1] * 4), TypeError, ("class_weights: expected a real floating", "int32", "astype")),
           ("in a list", lambda x: [1.0] * 4, TypeError, ("class_weights: expected a dense array", "list")))},
    **{f"label_smoothing {value}": (
           lambda x, value=value: scree.cross_entropy(x.f(1, 4), x.i([0]), label_smoothing=value), error, message)
       for value, error, message in (
           (1.5, ValueError, ("label_smoothing: expected a number from 0 to 1, got 1.5",)),
           (-0.1, ValueError, ("label_smoothing: expected a finite number >= 0, got -0.1",)),
           ("much", TypeError, ("label_smoothing: expected a Python number, got 'much'",)))},
    "loss softcap": (lambda x: scree.cross_entropy(x.f(1, 4), x.i([0]), softcap=0), ValueError,
                     ("softcap: expected a finite number > 0, got 0",)),
    "z_loss": (lambda x: scree.linear_cross_entropy(x.f(1, 4), x.f(3, 4), x.i([0]), z_loss=-1e-4), ValueError,
               ("z_loss: expected a finite number >= 0, got -0.0001",)),
    "return_accuracy": (lambda x: scree.cross_entropy(x.f(1, 4), x.i([0]), return_accuracy=1), TypeError,
                        ("return_accuracy: expected True or False, got 1",)),
    "max_logits": (lambda x: scree.linear_cross_entropy(x.f(1, 4), x.f(3, 4), x.i([0]), max_logits=0), ValueError,
                   ("max_logits: expected",)),
    "class weights of the linear loss": (
        lambda x: scree.linear_cross_entropy(x.f(1, 4), x.f(3, 4), x.i([0]), class_weights=x.f(4)), ValueError,
        ("class_weights: expected shape (3,), one number per class, got (4,)",)),
    "loss weight": (lambda x: scree.linear_cross_entropy(x.r(ROWS, 4), x.f(4, 9), x.r(ROWS, dtype="int32")), ValueError,
                    ("weight: expected shape (classes, width)", "(3, None, 4)", "got (4, 9)")),
    "loss weight ragged": (lambda x: scree.linear_cross_entropy(x.f(5, 4), x.r(ROWS, 4), x.i([0] * 5)), TypeError,
                           ("weight: expected a dense array", "Array")),
    "loss weight dtype": (lambda x: scree.linear_cross_entropy(x.f(5, 4), x.i(np.zeros((9, 4))), x.i([0] * 5)), TypeError,
                          ("weight: expected the dtype of x", "float32", "int32", "astype")),
    "loss bias": (lambda x: scree.linear_cross_entropy(x.f(5, 4), x.f(9, 4), x.i([0] * 5), x.f(4)), ValueError,
                  ("bias: expected shape (9,), one number per class, got (4,)",)),
    "split sizes": (lambda x: scree.split(x.r(ROWS, 4), (1, 2)), ValueError, ("sizes: expected a sum of 4", "got (1, 2)")),
    "split number": (lambda x: scree.split(x.r(ROWS, 4), 2), TypeError, ("sizes: expected the size of each part, got 2",)),
    "split rows": (lambda x: scree.split(x.r(ROWS, 4), (1, 3), axis=1), ValueError, ("axis: expected an axis of the elements",)),
    "split part": (lambda x: scree.split(x.r(ROWS, 4), (1.0, 3)), TypeError, ("sizes: expected a Python integer, got 1.0",)),
    "swiglu of rows": (lambda x: scree.swiglu(x.r(ROWS)), ValueError, ("x: expected a last axis of gates", "(3, None)")),
    "swiglu odd": (lambda x: scree.swiglu(x.r(ROWS, 3)), ValueError, ("x: expected a last axis of an even size", "(3, None, 3)")),
    "norm of rows": (lambda x: scree.rms_norm(x.r(ROWS)), ValueError, ("x: expected element axes", "(3, None)", "last axis")),
    "norm of integers": (lambda x: scree.layer_norm(x.r(ROWS, 4, dtype="int32")), TypeError, ("x: expected a real floating",)),
    "norm of a number": (lambda x: scree.layer_norm(1.0), TypeError, ("x: expected a dense array", "float")),
    "norm weight": (lambda x: scree.rms_norm(x.r(ROWS, 4), x.f(3)), ValueError, ("weight: expected shape (4,)", "got (3,)")),
    "norm weight a list": (lambda x: scree.rms_norm(x.r(ROWS, 4), [1] * 4), TypeError,
                           ("weight: expected a dense array", "list")),
    "norm bias": (lambda x: scree.layer_norm(x.r(ROWS, 4), x.f(4), x.f(1, 4)), ValueError,
                  ("bias: expected shape (4,)", "(1, 4)")),
    "norm eps": (lambda x: scree.rms_norm(x.r(ROWS, 4), eps=-1), ValueError, ("eps: expected a finite number >= 0, got -1",)),
    "norm residual dense": (lambda x: scree.rms_norm(x.r(ROWS, 4), residual=x.f(5, 4)), TypeError,
                            ("residual: expected a ragged array",)),
    "norm residual ragged": (lambda x: scree.rms_norm(x.f(5, 4), residual=x.r(ROWS, 4)), TypeError,
                             ("residual: expected a dense array", "Array")),
    "norm residual shape": (lambda x: scree.layer_norm(x.r(ROWS, 4), residual=x.r(ROWS, 3)), ValueError,
                            ("residual: expected shape (3, None, 4), the shape of x", "got (3, None, 3)")),
    "norm residual rows": (lambda x: scree.rms_norm(x.r(ROWS, 4), residual=x.r(ROWS[::-1], 4)), ValueError,
                           ("residual: expected rows of equal lengths",)),
    "rope odd": (lambda x: scree.rope(x.r(ROWS, 3)), ValueError, ("x: expected an even head_dim of at least 2, got 3",)),
    "rope of rows": (lambda x: scree.rope(x.r(ROWS)), ValueError, ("x: expected a ragged array (n, None, ..., head_dim)",)),
    "rope theta": (lambda x: scree.rope(x.r(ROWS, 4), theta=0), ValueError, ("theta: expected a finite number > 0, got 0",)),
    "rope pairs": (lambda x: scree.rope(x.r(ROWS, 4), interleaved="no"), TypeError, ("interleaved: expected True or", "'no'")),
    "rope start": (lambda x: scree.rope(x.r(ROWS, 4), start=x.i([0])), ValueError, ("start: expected shape (3,)", "got (1,)")),
    "rope start float": (lambda x: scree.rope(x.r(ROWS, 4), start=x.f(3)), TypeError, ("start: expected integers", "float32")),
    "rope k dense": (lambda x: scree.rope(x.r(ROWS, 4), x.f(5, 4)), TypeError, ("k: expected a ragged array",)),
    "rope k head_dim": (lambda x: scree.rope(x.r(ROWS, 4), x.r(ROWS, 6)), ValueError, ("k: expected head_dim 4", "got 6")),
    "dropout rate": (lambda x: scree.dropout(x.r(ROWS), 1.0, None), ValueError,
                     ("rate: expected a probability in [0, 1)", "1.0")),
    "dropout of integers": (lambda x: scree.dropout(x.r(ROWS, dtype="int32"), 0.5, None), TypeError, ("x: expected a real",)),
    "dropout without a key": (lambda x: scree.dropout(x.r(ROWS), 0.5, None), TypeError, (": expected a",)),
    "gather a dense index": (lambda x: scree.gather(x.r(ROWS), x.i([0])), TypeError, ("index: expected a ragged array",)),
    "gather beyond*": (lambda x: scree.gather(x.r(ROWS), x.r([7], dtype="int32")), ValueError,
                       ("numbers in [0, 5), got 0 to 6",)),
    "gather by float": (lambda x: scree.gather(x.r(ROWS), x.r([2])), TypeError, ("index: expected integers", "float32")),
    "gather axis": (lambda x: scree.gather(x.r(ROWS), x.r([1], dtype="int32"), axis=2), ValueError,
                    ("axis: expected 1", "got 2")),
    "gather rows beyond": (lambda x: scree.gather(x.r(ROWS), x.i([3]), axis=0), IndexError, ("numbers in [-3, 3), the rows, got",)),
    "scatter beyond*": (lambda x: scree.scatter(x.f(2), x.i([0, 4]), 4), ValueError,
                        ("index: expected numbers in [0, 4)", "to 4")),
    "scatter negative*": (lambda x: scree.scatter_add(x.f(2), x.i([0, -1]), 4), ValueError, ("index:", "got -1 to 0")),
    "scatter too few": (lambda x: scree.scatter(x.f(3), x.i([0, 1]), 4), ValueError,
                        ("expected shape (3,), one number per token", "(2,)")),
    "scatter by float": (lambda x: scree.scatter(x.f(2), x.f(2), 4), TypeError, ("index: expected integers", "float32")),
    "scatter size": (lambda x: scree.scatter(x.f(1), x.i([0]), -1), ValueError, ("size: expected at least 0, got -1",)),
    "scatter, other rows": (lambda x: scree.scatter(x.r(ROWS), x.r([3, 2, 0], dtype="int32"), 9), ValueError,
                            ("index: expected the rows of x",)),
    "scatter rows that meet": (lambda x: scree.scatter(x.r(ROWS), x.i([0, 0, 1]), 3, axis=0), ValueError,
                               ("a different index for every row",)),
    "scatter rows beyond": (lambda x: scree.scatter(x.r(ROWS), x.i([0, 1, 3]), 3, axis=0), ValueError, ("numbers in [0, 3)",)),
    "group beyond*": (lambda x: scree.group(x.f(2), x.i([0, 3]), 3), ValueError,
                      ("ids: expected numbers in [0, 3), got 0 to 3",)),
    "group by float": (lambda x: scree.group(x.f(2), x.f(2), 3), TypeError, ("ids: expected integers", "float32")),
    "group too few": (lambda x: scree.group(x.f(2), x.i([0]), 3), ValueError,
                      ("ids: expected shape (2,)", "(1,)")),
    "groups": (lambda x: scree.group(x.f(1), x.i([0]), -1), ValueError, ("num_groups: expected at least 0, got -1",)),
    # --------------------------------------------------------------------------------- namespaces
    # and the registry
    "namespace of nothing": (lambda x: scree.namespace(), TypeError, ("arrays: expected at least one array, got ()",)),
    "namespace of a number": (lambda x: scree.namespace(1.0), TypeError, ("arrays: expected at least one array",)),
    "namespace of a list": (lambda x: scree.namespace(x.f(1), [1]), TypeError,
                            ("arrays[1]: expected a ragged or dense", "list")),
    "namespace of two": (lambda x: scree.namespace(x.r(ROWS), x.other.f(1)), TypeError,
                         ("arrays[1]: expected an array of {lib} as the others, got one of {other}",)),
    "api_version": (lambda x: x.r(ROWS).__array_namespace__(api_version="2020.01"), ValueError,
                    ("api_version: expected one of", "2024.12", "got '2020.01'")),
    "explain": (lambda x: scree.explain("flashing", x.r(ROWS)), ValueError, ("name: expected one of", "'flashing'")),
    "explain two": (lambda x: scree.explain(["softmax"], x.r(ROWS)), ValueError,
                    ("name: expected the name of a function", "['softmax']")),
    "explain a bad call": (lambda x: scree.explain("softmax", x.f(3)), TypeError, ("x: expected a ragged array",)),
}  # fmt: skip


#: Calls that return an array with a wrong layout where values are not read; `validate()` reports
#: the error.
FOUND_BY_VALIDATE = (
    "offsets fall*",
    "offsets start late*",
    "offsets end early*",
    "offsets end late*",
    "max_length too small*",
)


# The other libraries read values for free.
@pytest.mark.needs("mlx")
@pytest.mark.parametrize("case", [case for case in CASES if case.endswith("*")])
def test_bad_values_on_mlx_are_not_read_until_validate(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx.core as mx

    call, error, fragments = CASES[case]
    lib = load("mlx")
    with monkeypatch.context() as patch:
        for module, name in ((mx, "eval"), (np, "array"), (np, "asarray")):
            original = getattr(module, name)

            def trap(
                x: Any, *args: Any, original: Any = original, name: str = name, **kwargs: Any
            ) -> Any:
                assert not isinstance(x, mx.array), f"{name} evaluated an array of MLX"
                return original(x, *args, **kwargs)

            patch.setattr(module, name, trap)
        got = call(lib)
    for part in got if isinstance(got, tuple) else (got,):
        assert isinstance(part, scree.Array | mx.array)
    if case in FOUND_BY_VALIDATE:
        with pytest.raises(error) as caught:
            got.validate()
        for fragment in fragments:
            assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name in NAMES for case in CASES if name != "mlx" or not case.endswith("*")],
)
def test_invalid_calls_raise_and_name_the_argument(name: str, case: str) -> None:
    call, error, fragments = CASES[case]
    lib = load(name)
    with pytest.raises(error) as caught:
        call(lib)
    for fragment in fragments:
        assert fragment.format(lib=name, other=lib.other.name) in str(caught.value)
    last = Path(caught.traceback[-1].path)
    assert last.is_relative_to(Path(scree.__file__).parent) or last == Path(__file__), (
        f"the error comes from {last}"
    )


def test_errors_name_other_devices() -> None:
    import array_api_strict as xp

    there = xp.Device("device1")
    here, far = xp.ones(5), xp.ones(5, device=there)
    offsets = xp.asarray([0, 2, 5], dtype=xp.int32)
    message = "expected device array_api_strict.Device('CPU_DEVICE'), got array_api_strict.Device('device1')"
    arr = scree.Array(here, offsets)
    away = arr.to_device(there)
    for name, call in {
        "offsets": lambda: scree.Array(here, offsets.to_device(there)),
        "values": lambda: arr.with_values(far),
        "arrays[1]": lambda: scree.pack([here, far]),
        "add": lambda: arr + away,
        "weight": lambda: scree.rms_norm(arr.with_values(xp.ones((5, 5))), far),
        "start": lambda: scree.rope(
            arr.with_values(xp.ones((5, 4))), start=xp.asarray([0, 0], device=there)
        ),
        "ids": lambda: scree.group(here, xp.zeros(5, dtype=xp.int32, device=there), 1),
    }.items():
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value).startswith(f"{name}: expected ")
        assert message in str(caught.value) or name == "arrays[1]"
