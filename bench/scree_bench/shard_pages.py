"""The questions of the overview about several GPUs, and the tables of the guide about them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from . import results
from .page_parts import Answer, draw_dots, iterate_cases, make_table, short_name
from .results import Result, Row, unit

#: The value of a row that has the efficiency of a step.
_EFFICIENCY = "step_efficiency_share"


def shards(runs: Sequence[Result]) -> Answer | None:
    """Compare attention over several GPUs with one GPU."""
    chosen = [r for r in runs if r.command == "shards" and "gpu" in r.machine]
    table = shards_attention_table(chosen)
    if not table.lines:
        return None
    groups: dict[str, dict[str, float]] = {}
    for r, case, rows in _shard_cases(chosen):
        label = f"{case['processes']} {short_name(r)}"
        groups.setdefault(case["batch"], {})[label] = rows["scree"].values[_EFFICIENCY]
    text = (
        "Forward and backward of causal attention with 32 and 8 heads of 128. The efficiency is the "
        "time of one GPU, divided by the number of GPUs and by the time of the slowest of them. "
        "[More than one GPU](guides/multi-gpu.md) explains both exchanges."
    )
    title = "Efficiency of a step of attention over several GPUs: right is better"
    picture = partial(draw_dots, groups=groups, title=title, limit="linear")
    used = [r for r in chosen if any(_EFFICIENCY in row.values for row in r.rows)]
    return Answer("Attention over several GPUs", text, table, ("overview-shards", picture), used)


def _shard_cases(runs: Sequence[Result]) -> Iterator[tuple[Result, dict[str, Any], dict[str, Row]]]:
    """Yield the cases of attention over several GPUs, the same batches one after another.

    Of several runs with one case on one machine, only the newest counts.
    """
    newest: dict[tuple[Any, ...], tuple[Result, dict[str, Any], dict[str, Row]]] = {}
    for r in sorted(runs, key=lambda r: r.date):
        for case, rows in iterate_cases(
            r, lambda row: "batch" in row.case and "model" not in row.case
        ):
            if _EFFICIENCY in rows["scree"].values:
                newest[short_name(r), case["batch"], case["processes"]] = r, case, rows
    order = list(dict.fromkeys(batch for _, batch, _ in newest))
    yield from sorted(
        newest.values(),
        key=lambda x: (order.index(x[1]["batch"]), x[1]["processes"], short_name(x[0])),
    )


def shards_attention_table(runs: Sequence[Result]) -> results.Table:
    """Return the efficiency of attention over several GPUs: one line per batch and number of GPUs."""
    lines = []
    for r, case, rows in _shard_cases(runs):
        scree, share = rows["scree"].values, unit(_EFFICIENCY).show
        forms = {form: rows.get(f"scree, {form}") for form in ("keys", "heads")}
        efficiencies = {x: row.values[_EFFICIENCY] for x, row in forms.items() if row is not None}
        # The form that has no row of its own is the form that attention chose.
        default = "none"
        if efficiencies:
            default = "keys" if "heads" in efficiencies else "heads"
            efficiencies[default] = scree[_EFFICIENCY]
        base = rows["scree, one device"].values["step_s"] / case["processes"]
        peer = min(
            (row.values["step_s"] for who, row in rows.items() if who.startswith("ring")),
            default=None,
        )
        lines.append([
            short_name(r), case["batch"], str(case["processes"]),
            unit("step_s").show(base * case["processes"]), unit("step_s").show(scree["step_s"]),
            default, share(scree[_EFFICIENCY]), share(scree["forward_efficiency_share"]),
            *(share(efficiencies[x]) if x in efficiencies else "" for x in forms),
            share(base / peer) if peer else "",
            unit("received_bytes").show(scree.get("received_bytes", 0.0)),
        ])  # fmt: skip
    header = ["machine", "batch", "GPUs", "one GPU", "scree", "exchange", "efficiency", "forward",
              "by keys", "by heads", "best of ring-flash-attention", "received per GPU, forward"]  # fmt: skip
    return make_table(header, lines)


def shards_training(runs: Sequence[Result]) -> Answer | None:
    """Compare training over several GPUs with one GPU."""
    chosen = [r for r in runs if r.command == "shards" and "gpu" in r.machine]
    chosen = [r for r in chosen if any("model" in row.case for row in r.rows)]
    table = shards_training_table(chosen)
    if not table.lines:
        return None
    groups: dict[str, dict[str, float]] = {}
    rows = [(r, x) for r in chosen for x in r.rows if "efficiency_share" in x.values]
    for r, row in sorted(rows, key=lambda entry: _shards_training_order(entry[1])):
        mode = row.who.removeprefix("scree, ")
        mode = "context x data, FSDP2" if " x " in mode else mode
        if not _has_setting(row):
            case = row.case
            label = f"{case['model']}, {case['batch']}, {case['processes']} {short_name(r)}"
            groups.setdefault(label, {})[mode] = row.values["efficiency_share"]
    text = (
        "Data parallel training has one batch per GPU. Context parallel training cuts one batch "
        "over all GPUs, and a mesh cuts each of its batches over some GPUs."
    )
    title = "Efficiency of training over several GPUs: right is better"
    picture = partial(draw_dots, groups=groups, title=title, limit="linear")
    return Answer(
        "Training over several GPUs", text, table, ("overview-shards-training", picture), chosen
    )


def _has_setting(row: Row) -> bool:
    """Return whether DDP or FSDP2 has another setting than its default."""
    return row.who.startswith("scree, data parallel") and row.who.count(",") > 2


def _shards_training_order(row: Row) -> tuple[Any, ...]:
    """Return the key that sorts results of training over several GPUs."""
    return row.case["model"], -row.case["rows"], row.case["processes"]


def shards_training_table(runs: Sequence[Result]) -> results.Table:
    """Return the speed of training over several GPUs: one line per model, batch and mode."""
    keyed = []
    for r in runs:
        base: dict[str, float] = {}
        for row in (row for row in r.rows if "model" in row.case and "step_tokens" in row.values):
            case, values = row.case, row.values
            key, rate = f"{case['model']}, {case['batch']}", values["step_tokens"]
            base.setdefault(key, rate)  # the first row has one device
            if "efficiency_share" not in values or _has_setting(row):
                continue
            show, memory = unit("step_tokens").show, values.get("memory_bytes")
            keyed.append((_shards_training_order(row), [
                short_name(r), case["model"], case["batch"].replace("packed", f"{case['rows']} documents"),
                str(case["processes"]), row.who.removeprefix("scree, "), show(base[key]), show(rate),
                f"{rate / base[key]:.2f}", unit("efficiency_share").show(values["efficiency_share"]),
                unit("memory_bytes").show(memory) if memory else "",
                f"{values['loss_error']:.0e}",
            ]))  # fmt: skip
    lines = [line for _, line in sorted(keyed, key=lambda entry: entry[0])]
    header = ["machine", "model", "batch", "GPUs", "mode", "one GPU", "all GPUs", "over one GPU",
              "efficiency", "memory per GPU", "difference of losses"]  # fmt: skip
    return make_table(header, lines)


def shards_settings_table(runs: Sequence[Result]) -> results.Table:
    """Return the speed and the memory of data parallel training: one line per setting."""
    lines = []
    for r in runs:
        if not r.config.get("settings"):
            continue
        for row in (row for row in r.rows if "memory_bytes" in row.values):
            case, values = row.case, row.values
            devices = case["processes"] if "efficiency_share" in values else 1
            batches = re.search(r"(\d+) batches per step", case["batch"])
            lines.append([
                f"{devices} {short_name(r)}", case["model"], batches[1] if batches else "1",
                re.sub("^scree, (data parallel, )?", "", row.who), unit("step_s").show(values["step_s"]),
                *(unit(name).show(values[name]) if name in values else "" for name in
                  ("efficiency_share", "memory_bytes", "loss_error")),
            ])  # fmt: skip
    header = ["GPUs", "model", "batches per GPU and step", "setting", "step", "efficiency",
              "memory per GPU", "difference of losses"]  # fmt: skip
    return make_table(header, lines)


def shards_balance_table(runs: Sequence[Result]) -> results.Table:
    """Return the time of the slowest of several GPUs relative to their mean."""
    lines = [
        [
            short_name(r), str(row.case["processes"]), row.who.removeprefix("scree, "),
            str(row.case["window"]), f"{row.values['slowest_rank_ratio']:.2f}",
        ]
        for r in runs for row in r.rows if "token_cost_value" in row.values
    ]  # fmt: skip
    return make_table(["machine", "GPUs", "cost", "batches per window", "slowest over mean"], lines)


def guide_tables(runs: Sequence[Result]) -> dict[str, results.Table]:
    """Return the tables that guides name, as in ``<!-- table: shards-attention -->``."""
    chosen = [r for r in runs if r.command == "shards" and "gpu" in r.machine]
    return {
        "shards-attention": shards_attention_table(chosen),
        "shards-training": shards_training_table(chosen),
        "shards-settings": shards_settings_table(chosen),
        "shards-balance": shards_balance_table(chosen),
    }
