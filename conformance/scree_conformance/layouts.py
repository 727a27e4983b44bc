"""Row lengths that break ragged code."""

#: A layout by its name, or by the lengths of its rows.
Layout = str | list[int]

#: Name -> row lengths. The three layouts with empty and other rows have the same total length and
#: maximum, so that libraries compile them once.
LAYOUTS: dict[str, list[int]] = {
    "plain": [3, 2, 4],
    "empty_first": [0, 0, 5, 1, 3],
    "empty_last": [3, 5, 1, 0, 0],
    "empty_between": [3, 0, 1, 0, 5],
    "all_empty": [0, 0, 0],
    "no_rows": [],
    "one_row": [7],
    "ones": [1, 1, 1, 1],
    "one_long": [2, 1, 500, 0, 3],
    "blocks": [1, 31, 32, 33, 63, 64, 65, 127, 129],
}

#: Layouts to try; dtypes other than the first run only on the first layout of the tuple.
SHORT = ("empty_between", "no_rows")
ALL = ("empty_between", *(name for name in LAYOUTS if name != "empty_between"))
#: Layouts for libraries that compile every shape.
FEW = ("empty_first", "no_rows", "one_long")
EMPTY = ("empty_between", "empty_first", "empty_last", "all_empty", "no_rows")


def lengths_of(layout: Layout) -> list[int]:
    """Return the lengths of the rows."""
    return LAYOUTS[layout] if isinstance(layout, str) else layout
