"""Results of a run: the JSON schema, reading, writing, checking, tables and comparison.

A row has a contender (``who``), its case and its outcome::

    {"case": {"rows": 16, "dtype": "float32"}, "who": "scree", "status": "ok", "why": "",
     "values": {"forward_s": 0.0123, "forward_error": 2e-7},
     "spreads": {"forward_s": 0.0061}, "counts": {"forward_s": 3}}

The name of a value ends in its unit: see `UNITS`. A sampled value is the median of its samples. Its
spread is half the interquartile range of the samples relative to the median, and its count is the
number of samples. The samples themselves are not stored: they were nine tenths of the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .measure import FAILED, OUT_OF_MEMORY, Failure, median, spread

SCHEMA = "scree-bench/2"
#: Digits of a stored number. Further digits are noise.
DIGITS = 6
OK = "ok"
#: Contenders that do less than the others: scree is not expected to be faster.
LIMITS = (
    "limit",
    "plain copy",
    "nothing",
    "empty",
    "loads only",
    "torch, all rows as one",
    "torch, one dense product",
)


class Unit(NamedTuple):
    """Format of a value, and whether less or more is better (-1 or 1; 0 for neither)."""

    show: Callable[[float], str]
    better: int


def _scaled(steps: Sequence[tuple[float, str]], digits: int = 3) -> Callable[[float], str]:
    def show(x: float) -> str:
        size, unit = next(((s, u) for s, u in steps if abs(x) >= s), steps[-1])
        text = f"{x / size:.{digits}g}"
        return f"{float(text):,.0f} {unit}" if "e" in text else f"{text} {unit}"

    return show


#: Last word of a value's name -> its unit.
UNITS = {
    "s": Unit(_scaled([(1, "s"), (1e-3, "ms"), (1e-6, "us")]), -1),
    "bytes": Unit(_scaled([(1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")]), -1),
    "flops": Unit(_scaled([(1e12, "TFLOP/s"), (1e9, "GFLOP/s")]), 1),
    "rate": Unit(_scaled([(1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s")]), 1),
    "tokens": Unit(_scaled([(1e6, "M tokens/s"), (1e3, "k tokens/s"), (1, "tokens/s")]), 1),
    "saved": Unit(lambda x: f"{x:.1%}", 1),
    "share": Unit(lambda x: f"{x:.1%}", 0),
    "error": Unit(lambda x: f"{x:.1e}", -1),
    "hz": Unit(_scaled([(1e9, "GHz"), (1e6, "MHz")]), 0),
    "ratio": Unit(lambda x: f"{x:.2f}x", -1),
    "count": Unit(lambda x: f"{x:,.0f}", 0),
    "value": Unit(lambda x: f"{x:.6g}", 0),
}


def unit(name: str) -> Unit:
    """Return the unit of a value, from its name."""
    return UNITS[name.rpartition("_")[2]]


@dataclass
class Row:
    """One contender on one case."""

    case: dict[str, Any]
    who: str
    status: str = OK
    why: str = ""
    values: dict[str, float] = field(default_factory=dict)
    spreads: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, outcome: Sequence[float] | Failure) -> None:
        """Add samples, or the reason for their absence. Earlier measurements stay."""
        if isinstance(outcome, Failure):
            self.status = outcome.status
            self.why = "; ".join(filter(None, (self.why, f"{name}: {outcome.why}")))
        else:
            self.values[name] = round_digits(median(outcome))
            self.spreads[name] = round_digits(spread(outcome), 2)
            self.counts[name] = len(outcome)


def round_digits(x: float, digits: int = DIGITS) -> float:
    """Round to significant digits."""
    return float(f"{x:.{digits}g}")


@dataclass
class Result:
    """One run of one subcommand."""

    command: str
    config: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    date: str
    rows: list[Row] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    complete: bool = False
    schema: str = SCHEMA

    @property
    def part(self) -> str:
        """The part of the subcommand that was run, or "" for the whole subcommand."""
        return str(self.machine.get("part", ""))

    @property
    def where(self) -> str:
        """The measured device, in words."""
        about = self.machine
        return str(about["gpu"]) if "gpu" in about else f"{about['cpu']}, {about['cores']} cores"

    @property
    def limits(self) -> list[str]:
        """The limits of the machine, in words."""
        rates = self.machine.get("limits", {})
        return [
            f"{name.rpartition('_')[0].replace('_', ' ')} {unit(name).show(x)}"
            for name, x in rates.items()
        ]

    def write(self, path: Path) -> None:
        """Write the JSON, with one line per row. A process that ends here leaves the old file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        data = asdict(self)
        for part in (data["machine"], data, *data["rows"]):
            for name in {"limits", "extra", "values"} & part.keys():
                part[name] = _rounded(part[name])
        rows = ",\n".join(map(_compact, data.pop("rows")))
        head = ",\n".join(f"{_compact(name)}:{_compact(x)}" for name, x in data.items())
        written = path.with_suffix(".json.part")
        written.write_text(f'{{{head},\n"rows":[\n{rows}\n]}}\n', encoding="utf-8")
        written.replace(path)


def _rounded(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _rounded(x) for name, x in data.items()}
    if isinstance(data, (list, tuple)):
        return [_rounded(x) for x in data]
    if isinstance(data, float):
        short = round_digits(data)
        # An integer is shorter than "123456000.0".
        return int(short) if short.is_integer() and abs(short) < 2**53 else short
    return data


def _compact(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


def read(path: Path) -> Result:
    """Read the JSON of a run.

    Raises
    ------
    ValueError
        If it is not a result of scree-bench. The message names the first difference from the
        schema.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected JSON of scree-bench, got {error}") from error
    try:
        data = _reduced(data)
        check(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Result(**{**data, "rows": [Row(**row) for row in data["rows"]]})


def _reduced(data: Any) -> Any:
    """Reduce the rows of the first schema, which held all samples, to the present schema."""
    if not isinstance(data, dict) or data.get("schema") != "scree-bench/1":
        return data
    rows = []
    for row in data.get("rows", []):
        kept = {name: x for name, x in row.items() if name != "samples"}
        samples = row.get("samples", {})
        kept["spreads"] = {name: round_digits(spread(x), 2) for name, x in samples.items()}
        kept["counts"] = {name: len(x) for name, x in samples.items()}
        rows.append(kept)
    return {**data, "schema": SCHEMA, "rows": rows}


_NUMBER = (int, float)
_ROW: dict[str, Any] = {
    "case": {str: (str, int, float, bool, type(None))},
    "who": str, "status": (OK, OUT_OF_MEMORY, FAILED), "why": str,
    "values": {str: _NUMBER}, "spreads": {str: _NUMBER}, "counts": {str: int},
}  # fmt: skip
_RESULT: dict[str, Any] = {
    "schema": (SCHEMA,), "command": str, "config": dict, "machine": dict,
    "versions": {str: str}, "date": str, "rows": [_ROW],
    "left_out": [{"what": str, "why": str}], "extra": dict, "complete": bool,
}  # fmt: skip


def check(data: Any, schema: Any = None, path: str = "result") -> None:
    """Raise `ValueError` if JSON differs from the schema, and name the place.

    A form is a type or several types; the allowed strings; ``[form]`` for a list; ``{str: form}``
    for any names, or ``{"name": form, ...}`` for exactly these names.
    """
    schema = _RESULT if schema is None else schema
    if isinstance(schema, list):
        if not isinstance(data, list):
            raise ValueError(f"{path}: expected a list, got {type(data).__name__}")
        for i, x in enumerate(data):
            check(x, schema[0], f"{path}[{i}]")
    elif isinstance(schema, dict):
        if not isinstance(data, dict):
            raise ValueError(f"{path}: expected an object, got {type(data).__name__}")
        if str not in schema and data.keys() != schema.keys():
            raise ValueError(
                f"{path}: expected the names {', '.join(schema)}, got {', '.join(data)}"
            )
        for name, x in data.items():
            check(x, schema.get(name, schema.get(str)), f"{path}.{name}")
            if path.endswith(".values") and name.rpartition("_")[2] not in UNITS:
                raise ValueError(f"{path}.{name}: expected a name that ends in {', '.join(UNITS)}")
    elif isinstance(schema, tuple) and isinstance(schema[0], str):
        if data not in schema:
            raise ValueError(f"{path}: expected {' or '.join(map(repr, schema))}, got {data!r}")
    elif not isinstance(data, schema) or (isinstance(data, bool) and schema is _NUMBER):
        raise ValueError(f"{path}: expected {schema}, got {data!r}")


# --- tables ---
class Table(NamedTuple):
    """A table as text.

    The caption has the case entries that all rows share. Failures are notes below the table.
    """

    caption: str
    header: list[str]
    lines: list[list[str]]
    notes: list[str]

    def markdown(self) -> str:
        """The table in Markdown."""
        rows = [
            self.header,
            ["---"] * len(self.header),
            *([_escape(x) for x in line] for line in self.lines),
        ]
        caption = [f"{self.caption[0].upper()}{self.caption[1:]}:", ""] if self.caption else []
        notes = (
            ["", *(f"- {note.replace('<', '&lt;')}" for note in self.notes)] if self.notes else []
        )
        return "\n".join([*caption, *("| " + " | ".join(row) + " |" for row in rows), *notes])


def _escape(entry: str) -> str:
    """Escape what Markdown would read as the end of a cell or as HTML, such as C++ templates."""
    return entry.replace("|", "\\|").replace("<", "&lt;")


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def cell(row: Row, name: str, reference: Row | None) -> str:
    """Return a value as text.

    Sampled values also show the spread. Times and bytes also show the ratio to the reference row,
    in bold if the row is a peer that needs less than the reference.
    """
    if name not in row.values:
        return row.status if row.status != OK else ""
    x, kind = row.values[name], unit(name)
    text = kind.show(x)
    if name.endswith("_s") and row.counts.get(name, 0) > 1:
        text += f" ±{row.spreads[name]:.0%}"
    base = reference.values.get(name) if reference is not None and reference is not row else None
    if base and kind.better < 0 and not name.endswith(("_error", "_ratio")):
        ratio = f"({x / base:.2f}x)"
        text += f" {bold(ratio)}" if is_loss(base / x if x else 1.0, row.who) else f" {ratio}"
    return text


def is_loss(ratio: float, peer: str) -> bool:
    """Return whether scree needs more than a peer, as shown with two decimals.

    A limit is not a peer, and neither is another form of scree.
    """
    return round(ratio, 2) > 1 and peer not in LIMITS and not peer.startswith("scree")


def bold(text: str) -> str:
    """Return text that is bold in Markdown."""
    return f"**{text}**"


def tables(rows: Sequence[Row], values_shown: Sequence[str] = ()) -> list[Table]:
    """Return one table per kind of case, with its rows side by side.

    With `shown`, only these values, in this order.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.case), []).append(row)
    return [_table(list(keys), group, values_shown) for keys, group in groups.items()]


def _table(keys: list[str], rows: list[Row], values_shown: Sequence[str]) -> Table:
    shared = {k: v for k, v in rows[0].case.items() if all(row.case[k] == v for row in rows)}
    keys = [k for k in keys if k not in shared]
    measured = _unique(name for row in rows for name in row.values)
    names = [name for name in values_shown if name in measured] or measured
    references: dict[str, Row] = {}  # scree, if measured
    for row in sorted(rows, key=lambda row: not row.who.startswith("scree")):
        references.setdefault(repr(row.case), row)
    lines, notes = [], []
    for row in rows:
        reference = references[repr(row.case)]
        lines.append(
            [
                *(text(row.case[k]) for k in keys),
                row.who,
                *(cell(row, name, reference) for name in names),
            ]
        )
        if row.status != OK:
            notes.append(_note(row, keys))
    titles = [_title(name) for name in names]
    caption = ", ".join(f"{k} {text(v)}" for k, v in shared.items())
    return Table(caption, [*keys, "", *titles], lines, notes)


def pivot(rows: Sequence[Row], value: str, by: Sequence[str], caption: str) -> Table:
    """Return a table of one value: one line per case and one column per contender.

    The entries `by` of the cases distinguish the lines.
    """
    rows = [row for row in rows if value in row.values or row.status != OK]
    names = _unique(row.who for row in rows)
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(tuple(row.case[k] for k in by), {})[row.who] = row
    lines = []
    for case, row_by_contender in cases.items():
        first = next(
            (row for who, row in row_by_contender.items() if who.startswith("scree")), None
        )
        lines.append(
            [
                *map(text, case),
                *(
                    cell(row_by_contender[who], value, first) if who in row_by_contender else ""
                    for who in names
                ),
            ]
        )
    return Table(
        caption, [*by, *names], lines, [_note(row, by) for row in rows if row.status != OK]
    )


def _note(row: Row, keys: Sequence[str]) -> str:
    return f"{', '.join([*(text(row.case[k]) for k in keys), row.who])}: {row.status}: {row.why}"


def _title(name: str) -> str:
    """Return the heading of a value. A unit that its numbers show is omitted."""
    quantity, unit_name = name.rpartition("_")[0].replace("_", " "), name.rpartition("_")[2]
    return quantity + {"s": "", "bytes": "", "value": "", "flops": " rate"}.get(
        unit_name, f" {unit_name}"
    )


def text(x: Any) -> str:
    """Return an entry of a case as text."""
    return (
        f"{x:,}"
        if isinstance(x, int) and not isinstance(x, bool)
        else f"{x:g}"
        if isinstance(x, float)
        else str(x)
    )


# --- compare ---
class Change(NamedTuple):
    """A value that changed between two runs."""

    case: dict[str, Any]
    who: str
    name: str
    before: float
    after: float
    noise: float
    better: bool | None


def compare(before: Result, after: Result, min_change: float = 0.05) -> list[Change]:
    """Return the values that changed beyond noise between two runs, the largest changes first.

    For sampled values, noise is three times the combined spread of both runs, and at least `least`.
    A computed value counts as changed if it differs at all.
    """
    previous_rows = {(repr(row.case), row.who): row for row in before.rows}
    changes = []
    for row in after.rows:
        previous = previous_rows.get((repr(row.case), row.who))
        for name in row.values:
            if previous is None or name not in previous.values:
                continue
            old_value, new_value = previous.values[name], row.values[name]
            sampled = name in row.spreads
            noise = (
                max(min_change, 3 * (previous.spreads.get(name, 0.0) + row.spreads[name]))
                if sampled
                else 1e-9
            )
            if abs(new_value - old_value) > noise * abs(old_value):
                better = unit(name).better
                changes.append(
                    Change(
                        row.case,
                        row.who,
                        name,
                        old_value,
                        new_value,
                        noise,
                        (new_value - old_value) * better > 0 if better else None,
                    )
                )
    return sorted(
        changes, key=lambda m: -abs(m.after / m.before - 1) if m.before else -float("inf")
    )


class Ratio(NamedTuple):
    """A value of one contender on one case in two runs; `ratio` is after divided by before."""

    case: dict[str, Any]
    who: str
    name: str
    before: float
    after: float
    ratio: float


def ratios(before: Result, after: Result, contenders: str = "scree") -> list[Ratio]:
    """Return the ratio of every value that both runs measured, the worst ratios first.

    Only contenders whose name starts with `contenders` are compared, and only values with a
    better direction (a time, a rate). Values that are zero or negative in one of the runs are
    left out. Ratios of rates are inverted for the order: the run that became slower comes first.
    """
    old = {(repr(row.case), row.who): row.values for row in before.rows}
    out = []
    for row in after.rows:
        previous = old.get((repr(row.case), row.who), {})
        for name, value in row.values.items():
            base = previous.get(name, 0.0)
            if row.who.startswith(contenders) and unit(name).better and base > 0 and value > 0:
                out.append(Ratio(row.case, row.who, name, base, value, value / base))
    return sorted(out, key=lambda r: r.ratio ** unit(r.name).better)
