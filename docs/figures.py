"""Draw `docs/rows.svg`: one ragged array as values and offsets, as rows, and cut into tiles."""

from pathlib import Path

import numpy as np

import scree

LENGTHS, TILE = (4, 2, 7), 3
# One color per row. All are light enough for dark digits on a light or dark page.
FILLS = ("#9ecae9", "#ffbf79", "#a8d5a2")
TEXT, LINE = "#7d8590", "#57606a"  # legible on white and on black
CELL, GAP = 30, 4


def cell(x: float, y: float, label: str, fill: str | None) -> str:
    """Return a token, or an empty slot if `fill` is None."""
    rect = f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="3"'
    if fill is None:
        return f'{rect} fill="none" stroke="{TEXT}" stroke-dasharray="3 3"/>'
    return (
        f'{rect} fill="{fill}" stroke="{LINE}"/>'
        f'<text x="{x + CELL / 2}" y="{y + 20}" text-anchor="middle" fill="#1f2328">{label}</text>'
    )


def note(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    """Return a line of text."""
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" fill="{TEXT}">'
        f"{text}</text>"
    )


def main() -> None:
    """Write the figure; the tiles come from the layout itself."""
    arr = scree.from_lengths(np.arange(sum(LENGTHS)), LENGTHS)
    row_of, step = scree.segment_ids(arr), CELL + GAP
    tiles = arr.layout.tiles(TILE)
    out, left = [], 20

    out.append(note(left, 24, "values: every token once, all rows end to end", weight="bold"))
    for token in arr.values:
        out.append(cell(left + token * step, 36, str(token), FILLS[row_of[token]]))
    for offset in arr.offsets:
        x = left + offset * step - GAP / 2
        out.append(
            f'<path d="M{x} 68v10" stroke="{TEXT}" stroke-width="2"/>'
            + note(x, 94, str(offset), "middle")
        )
    out.append(note(left + arr.total_length * step + 16, 94, "offsets"))

    out.append(note(left, 138, f"the rows: shape {arr.shape}", weight="bold"))
    for i, (start, stop) in enumerate(zip(arr.offsets, arr.offsets[1:], strict=False)):
        for token in range(start, stop):
            out.append(cell(left + (token - start) * step, 150 + i * step, str(token), FILLS[i]))

    right = left + 10 * step
    out.append(note(right, 138, f"tiles of {TILE} tokens", weight="bold"))
    for t in range(int(tiles.layout.offsets[-1])):
        column, line = divmod(t, 3)
        for slot in range(TILE):
            token = tiles.tokens[t, slot]
            fill = FILLS[tiles.rows[t]] if tiles.valid[t, slot] else None
            out.append(
                cell(
                    right + (column * (TILE + 0.7) + slot) * step,
                    150 + line * step,
                    str(token),
                    fill,
                )
            )

    width, height = right + 7 * step + left, 150 + len(LENGTHS) * step + 12
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" '
        'font-family="system-ui, sans-serif" font-size="13" role="img" '
        'aria-label="Thirteen tokens of three rows end to end, the offsets 0, 4, 6, 13, '
        'and the rows cut into six tiles">\n' + "\n".join(out) + "\n</svg>\n"
    )
    Path(__file__).with_name("rows.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
