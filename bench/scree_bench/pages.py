"""The pages of benchmarks: an overview with one table per question, and one page per machine.

A page is Markdown. The caller decides what a picture becomes: a file, or a part of the page.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from inspect import getdoc, signature
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from . import plots, results
from .commands import MEASURING
from .results import LIMITS, OK, Result, Row, bold, is_loss, unit

#: Takes the name of a picture and the function that draws it. Returns the Markdown.
Embed = Callable[[str, plots.Draw], str]

INTRODUCTION = """\
# Benchmarks

Each section answers one question with one table and one picture. A ratio is the time of scree
divided by the time of the peer: below 1 scree is faster. **Bold** marks a loss, where the peer is
faster. The pages per machine have all contenders, spreads, memory and errors.
"""

METHOD = """\
## How it is measured

Every number comes from `scree-bench`, which anyone can run: install it from a checkout, then
`scree-bench --help`. `scree-bench report` writes these pages from the JSON of the runs.

All contenders of a case run in one process, in alternating rounds, so that a drift of the machine
affects all of them equally. A contender whose time is used up leaves the rounds. The first call of
each is not counted. Contenders that could not run or ran out of memory are listed.

| on the pages per machine | meaning |
|---|---|
| number | median of the samples |
| ± | half the interquartile range relative to the median |
| (2.00x) | the number relative to scree; **bold** below 1: the peer needs less than scree |
| error | relative to float64 |
| limit | measured on the same machine in the same run: a large copy, or a large matrix product |

On GPUs, events time the device: one call at a time, with a rest between calls. While the device
sleeps, the host launches all kernels of the call, so that no kernel is late. A sample with a late
kernel is taken again. Before each call, zeros overwrite the L2 cache, as in
`triton.testing.do_bench`. The call finds dirty lines to write back and leaves its own, as in a
program. The driver is also asked to release lines that a kernel marked as persistent. Compiled
forms and some kernels of scree mark such lines, which outlive the zeros.

| H100 case, relative to this method | time |
|---|---|
| rope of 34 MB, in a loop without rests or zeros | 0.93 |
| rope of 34 MB, after a cache that was only read (fewer lines to write back) | 0.79 |
| reader of a tensor with persistent lines, without the release | 0.88 |
| attention with 128-wide heads, by `do_bench` without rests (same ratio to a peer) | 1.07 |

All arrays are random numbers, and so are the gradients of the results; the gradient of a loss is
one. All contenders get the same arrays. Multiplying equal numbers takes a device less power, and so
less time.

*Host* is the time in which the host prepares and launches a call. It is measured in separate later
rounds, in a loop of up to 30 calls that waits for none of them. A call that waits for both takes
the longer of the two. A call that itself waits for the device, such as a boolean mask, is timed
with its host work, after a short sleep. A core that has waited for 20 ms takes up to 200 us to wake
up, which a busy program does not pay.

*Before launch*, of `scree-bench decode`, is the part of it from the start of a call to its first launch.

### Random shapes

`scree-bench attention --random 100 --seed 1 --out results` compares attention with the fastest peer
of each shape: FlashAttention-2, -3 and -4, and `varlen_attn` of PyTorch. A shape depends on the seed
and its index only. A shape above a limit is drawn again.

| drawn | from |
|---|---|
| rows | 1 to 20,000, on a logarithmic scale |
| lengths | log-normal, Zipf, uniform, constant, or one long row |
| tokens | 1,000 to 500,000, on a logarithmic scale |
| head dimension | 32, 64, 72, 80, 96, 112, 128, 160, 192, 256; any multiple of 8 in one of four shapes |
| query heads per kv head | 1 to 16, with up to 64 query heads |
| data type | float16, bfloat16 |
| mask | causal in three of five shapes; a window in one of four |
| keys | other rows than the queries in two of five shapes |
| limits | 200 TFLOP forward and backward, 20 GB |

The command prints the median, the 95th percentile and the worst of the ratios, by class, and the ten
worst shapes. The JSON has the times of all contenders, the wall time of single calls, and the clock
rate after a call. A time is measured only if the result is right: up to 16 rows are compared with
float64, and the error may be twice the error of eager PyTorch.

| option | effect |
|---|---|
| `--out results` | The same command goes on after the last complete shape. |
| `--minutes 9` | No further shape starts after so many minutes. |
| `--compile-processes 12` | Processes compile the kernels of all shapes first. |
| `--fresh` | Earlier results of these shapes are discarded. |
| `--shapes list.json` | The shapes of a file are compared. |

The file is a list of objects with `lengths`, `heads` and `dim`, and optionally `kv_heads`, `dtype`,
`causal`, `window`, `key_lengths` and `name`. `[31, 250]` in the lengths is 250 rows of 31 tokens.

A peer that raises is listed with its reason. A peer that hangs or ends the process is left out on
that shape, and a new process goes on. `scree-bench compare` compares two such runs.
"""

#: Forms of a contender: scree is compared with peers in the same form.
FORMS = ("", ", compiled", ", captured", ", compiled, captured")


def read(paths: Sequence[Path]) -> tuple[list[Result], list[str]]:
    """Read runs, and return them with one message per file that is not a run.

    The name of a file says which part of a subcommand was run: ``attention-shapes-h100.json``.
    """
    runs, messages = [], []
    for path in paths:
        try:
            result = results.read(path)
        except ValueError as error:
            messages.append(str(error))
            continue
        part = path.stem.removeprefix(f"{result.command}-").removesuffix(result.machine["tag"])
        result.machine["part"] = part.strip("-").replace("-", " ")
        runs.append(result)
    runs.sort(key=lambda r: (r.machine.get("gpu") is None, MEASURING.index(r.command), _run(r)))
    return runs, messages


# --- the overview ---
class Answer(NamedTuple):
    """The answer to one question: a table, a picture, and the runs that they come from."""

    title: str
    text: str
    table: results.Table
    picture: tuple[str, plots.Draw]
    runs: list[Result]


def overview(runs: Sequence[Result], folder: str, embed: Embed) -> str:
    """Return the overview in Markdown. The pages per machine are in `folder`."""
    parts = [INTRODUCTION, *_contents(runs, folder)]
    for question in (attention, decode, kernels, training, documents, shards, shards_training, cpu):
        answer = question(runs)
        if answer is not None:
            picture = embed(*answer.picture)
            parts += [f"## {answer.title}", answer.text, *([picture] if picture else [])]
            parts += [answer.table.markdown(), _sources(answer.runs, folder)]
    return "\n\n".join(part.strip() for part in [*parts, METHOD, _commands()]) + "\n"


def _contents(runs: Sequence[Result], folder: str) -> Iterator[str]:
    """Yield a table of links: one line per subcommand, one column per machine."""
    if not runs:
        yield "There are no results yet."
        return
    machines = list(dict.fromkeys(r.where for r in runs))
    header = f"| all results | {' | '.join(machines)} |\n|---|{'---|' * len(machines)}"
    lines = []
    for _, name in sorted({(MEASURING.index(r.command), _run(r)) for r in runs}):
        dates = {r.where: f"[{r.date[:10]}]({_link(r, folder)})" for r in runs if _run(r) == name}
        lines.append(f"| {name} | {' | '.join(dates.get(where, '') for where in machines)} |")
    yield "\n".join([header, *lines])


def _sources(runs: Sequence[Result], folder: str) -> str:
    """Return the provenance of a table: the machine, the command, the date and the versions."""
    return fold("Machines, commands, dates and versions", "\n".join(
        f"- [{r.where}]({_link(r, folder)}): `{command_line(r)}`, {r.date[:10]}; {_versions(r)}."
        for r in runs
    ))  # fmt: skip


def attention(runs: Sequence[Result]) -> Answer | None:
    """Compare attention with the FlashAttention kernels on GPUs."""
    chosen = [r for r in runs if r.command == "attention" and "gpu" in r.machine and not r.part]
    peers = {
        "FA2 (aten)": "FA2",
        "FA3 (forward only)": "FA3",
        "FA4": "FA4",
        "efficient, packed": "efficient",
    }
    phases = {"forward": "forward", "both": "with gradients"}
    lines, groups = [], {}
    for r in chosen:
        for case, rows in _cases(r, lambda row: "work" in row.case):
            for phase, words in phases.items():
                value, scree = f"{phase}_s", rows.get("scree")
                if scree is None or value not in scree.values:
                    continue
                times = {who: row.values[value] for who, row in rows.items() if value in row.values}
                cells = [ratio(times["scree"], times.get(peer), peer) for peer in peers]
                label = f"{case['work']}, {case['dtype']}"
                shown = unit(value).show(times["scree"])
                lines.append([_short(r), label, words, shown, *cells])
                if r is chosen[0] and phase == "both":
                    share = scree.values.get("both_share")
                    # Float32 has no limit: scree uses other tensor cores than PyTorch's products.
                    limit = {"limit": times["scree"] * share} if share and share < 1 else {}
                    known = {name: times[who] for who, name in peers.items() if who in times}
                    groups[label] = {"scree": times["scree"], **known, **limit}
    if not lines:
        return None
    title = f"{_short(chosen[0])}: attention with gradients, less is better, one scale per workload"
    header = ["machine", "workload", "", "scree", *(f"/ {name}" for name in peers.values())]
    text = (
        "Causal attention on rows of different lengths, relative to FlashAttention-2, -3 and -4. "
        "*Efficient* is PyTorch's memory-efficient attention on packed rows. "
        "The limit is a large matrix product of the same dtype. "
        "[Speed of attention](attention-speed.md) describes the workloads."
    )
    picture = partial(_bars, groups=groups, kind="both_s", title=title)
    return Answer("Attention", text, _table(header, lines), ("overview-attention", picture), chosen)


def decode(runs: Sequence[Result]) -> Answer | None:
    """Compare attention to a paged cache with its peers."""
    chosen = [r for r in runs if r.command == "decode"]
    peers: dict[str, None] = {}
    cases = []
    for r in chosen:
        for case, rows in _cases(r, lambda row: row.case["kind"] == "decode"):
            if "call_s" in rows["scree"].values:
                times = {
                    x: row.values["call_s"] for x, row in rows.items() if "call_s" in row.values
                }
                cases.append((r, case, rows["scree"].values, times))
                peers |= dict.fromkeys(
                    who for who in times if not who.startswith("scree") and who not in LIMITS
                )
    if not cases:
        return None
    lines, groups = [], {}
    for r, case, values, times in cases:
        label = f"{case['case']}, pages of {case['page_size']}, {case['backend']}"
        lines.append([
            _short(r), label, unit("call_s").show(times["scree"]),
            unit("call_rate").show(values["call_rate"]),
            unit("share").show(values["call_of_copy_share"]) if "call_of_copy_share" in values else "",
            *(ratio(times["scree"], times.get(peer), peer) for peer in peers),
        ])  # fmt: skip
        if r is chosen[0]:
            groups[label] = {x: t for x, t in times.items() if x == "scree" or x in peers}
    header = ["machine", "rows and cached tokens", "scree", "bytes per second", "of a copy",
              *(f"/ {peer}" for peer in peers)]  # fmt: skip
    text = (
        "One query per row attends to a paged key-value cache with 32 and 8 heads of 128. Only "
        "keys and values count as bytes. FlashInfer is timed without its plan, which the pages per "
        "machine show. A contiguous cache has no page table to read."
    )
    title = f"{_short(chosen[0])}: decoding from a paged cache, less is better, one scale per case"
    picture = partial(_bars, groups=groups, kind="call_s", title=title)
    return Answer("Decoding", text, _table(header, lines), ("overview-decode", picture), chosen)


def kernels(runs: Sequence[Result]) -> Answer | None:
    """Compare the other kernels with the fastest peer on GPUs."""
    chosen = [
        r for r in runs if r.command in ("kernels", "norms") and "gpu" in r.machine and not r.part
    ]
    machines = list(dict.fromkeys(map(_short, chosen)))
    lines: dict[str, dict[str, str]] = {}
    groups: dict[str, dict[str, float]] = {}
    for r in chosen:
        for case, rows in _cases(r):
            batch = case.get("batch", f"width {case['width']:,}" if "width" in case else "")
            name = f"{case['operation']}, {batch}" if batch != "text" else case["operation"]
            for phase in ("forward", "both"):
                best = _fastest(rows, f"{phase}_s")
                if best is not None:
                    quotient = rows["scree"].values[f"{phase}_s"] / best.values[f"{phase}_s"]
                    words = f"{quotient:.2f}, {best.who}"
                    text = bold(words) if is_loss(quotient, best.who) else words
                    lines.setdefault(name, {})[f"{_short(r)} {phase}"] = text
                    # The picture has texts, with gradients where there are any.
                    if case.get("batch", "text") == "text":
                        groups.setdefault(name, {})[_short(r)] = quotient
    if not lines:
        return None
    columns = {f"{m} {p}": f"{m}, {words}" for m in machines for p, words in
               (("forward", "forward"), ("both", "with gradients"))}  # fmt: skip
    table = _table(
        ["operation", *columns.values()],
        [[name, *(cells.get(c, "") for c in columns)] for name, cells in lines.items()],
    )
    text = (
        "Each cell has the ratio to the fastest peer, and its name. The operations are those on "
        "batches of texts, unless the name says otherwise. A plain copy, one reduction of all rows "
        "and one dense product do less work: they are limits, not peers. "
        "[Speed of the other kernels](kernels-speed.md) explains them."
    )
    title = "scree's time / the fastest peer's, with gradients where there are any: left is faster"
    picture = partial(_dots, groups=groups, title=title, limit="as fast as the fastest peer")
    return Answer("Other kernels", text, table, ("overview-kernels", picture), chosen)


def training(runs: Sequence[Result]) -> Answer | None:
    """Compare a transformer block and training steps with the fastest peer in the same form."""
    chosen = [r for r in runs if r.command in ("block", "model")]
    # The first machine is a GPU, if there is one.
    drawn = chosen[0].machine.get("gpu") if chosen else None
    lines, groups = [], {}
    for r in chosen:
        value = "both_s" if r.command == "block" else "step_s"
        for case, rows in _cases(
            r, lambda row: row.case.get("part", "") in ("", "the whole block")
        ):
            # The compile times by depth are on the pages per machine.
            if "layers" in case or (r.part == "compiled" and "step_s" not in rows["scree"].values):
                continue
            name = (
                f"block of width {case['width']:,}, {case['dtype']}"
                if r.command == "block"
                else f"GPT-2 {case['size']}, {case['precision']}"
            )
            name += f", {case['tokens']:,} tokens"
            limit = rows["limit"].values.get(value) if "limit" in rows else None
            for form in FORMS:
                if form == "" and r.part == "compiled":
                    continue
                scree = rows.get(f"scree{form}")
                rivals = {who: row for who, row in rows.items() if _form(who) == form}
                best = _fastest(rivals, value, f"scree{form}")
                if scree is None or best is None:
                    continue
                time, peak = scree.values[value], "backward_peak_bytes"
                memory = scree.values.get(peak), best.values.get(peak)
                lines.append([
                    _short(r), name, form.removeprefix(", ") or "eager", unit(value).show(time),
                    best.who.removesuffix(form), unit(value).show(best.values[value]),
                    ratio(time, best.values[value], best.who),
                    ratio(memory[0], memory[1], best.who) if memory[0] else "",
                    f"{limit / time:.0%}" if limit else "",
                ])  # fmt: skip
                if form in ("", ", compiled") and r.machine.get("gpu") == drawn:
                    label = f"{name}{form}"
                    groups[label] = {"scree": time, best.who.removesuffix(form): best.values[value]}
                    groups[label] |= {"limit": limit} if limit else {}
    if not lines:
        return None
    header = ["machine", "model", "form", "scree", "fastest peer", "its time", "time ratio",
              "memory ratio", "of the limit"]  # fmt: skip
    text = (
        "Forward and backward of one transformer block, and whole training steps of GPT-2. "
        "Each form of scree is compared with the fastest peer in the same form: eager, compiled, "
        "or captured in a CUDA graph. The limit of the block is the sum of its large products and "
        "copies at the speed of the machine."
    )
    title = f"{_short(chosen[0])}: a block and a training step, less is better, one scale each"
    picture = partial(_bars, groups=groups, kind="both_s", title=title)
    return Answer("Training", text, _table(header, lines), ("overview-training", picture), chosen)


def documents(runs: Sequence[Result]) -> Answer | None:
    """Compare training on documents of any length with other batches of the same documents."""
    chosen = [r for r in runs if r.command == "train" and "gpu" in r.machine]
    # Contenders of one case may come from several runs. Each has the fused loss that suits it.
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    # If two runs have the same case and contender, the newest one counts.
    timed = [
        (r, row)
        for r in sorted(chosen, key=lambda r: r.date)
        for row in r.rows
        if "real_tokens" in row.values
    ]
    has_several_texts = len({r.extra["source"] for r, _ in timed}) > 1
    for r, row in timed:
        label = _documents_case(r, row)
        if has_several_texts:
            label += f", {r.extra['source']}"
        cases.setdefault((_short(r), label), {})[row.who] = row
    lines, groups = [], {}
    for (machine, label), rows in sorted(cases.items()):
        rate = {who: row.values["real_tokens"] for who, row in rows.items()}
        best = max((x for who, x in rate.items() if who.startswith("scree")), default=0.0)
        for who, row in sorted(rows.items(), key=lambda item: -rate[item[0]]):
            values = row.values
            lines.append([
                machine, label, who, unit("real_tokens").show(rate[who]),
                unit("mfu_share").show(values["mfu_share"]), unit("step_s").show(values["step_s"]),
                unit("peak_bytes").show(values["peak_bytes"]) if "peak_bytes" in values else "",
                "" if who.startswith("scree") or not best else ratio(1 / best, 1 / rate[who], who),
            ])  # fmt: skip
        if any(not who.startswith("scree") for who in rows):
            groups[f"{label}, {machine}"] = rate
    if not groups:
        return None
    header = ["machine", "model and batch", "contender", "real tokens/s", "MFU", "step", "peak",
              "time of scree / its time"]  # fmt: skip
    text = (
        "Whole steps of Llama-like models on real text, with products in bfloat16 and float32 "
        "weights, unless `bf16` says that the weights are bfloat16 too. All contenders get the same "
        "documents. Padding does not count as tokens. "
        "[Training on a GPU](training-speed.md) has the rules and the loss curves."
    )
    title = "Real tokens/s of a training step: more is better, one scale each"
    picture = partial(_bars, groups=groups, kind="real_tokens", title=title)
    return Answer(
        "Training on documents",
        text,
        _table(header, lines),
        ("overview-documents", picture),
        chosen,
    )


def _documents_case(result: Result, row: Row) -> str:
    """Return the model, the batch and the settings of training in words."""
    case, recompute = row.case, result.config["recompute"]
    text = f"{case['size']}, {case['tokens']:,} tokens, context {case['context']:,}"
    if (batches := result.config["accumulate"]) > 1:
        text += f", in {batches} batches"
    if case["precision"] != "amp":
        text += f", {case['precision']}"
    return text if recompute == "nothing" else f"{text}, {recompute} computed again"


def shards(runs: Sequence[Result]) -> Answer | None:
    """Compare attention over several GPUs with one GPU."""
    chosen = [r for r in runs if r.command == "shards" and "gpu" in r.machine]
    table = shards_attention_table(chosen)
    if not table.lines:
        return None
    groups: dict[str, dict[str, float]] = {}
    for r, case, rows in _shard_cases(chosen):
        label = f"{case['processes']} {_short(r)}"
        groups.setdefault(case["batch"], {})[label] = rows["scree"].values[_EFFICIENCY]
    text = (
        "Forward and backward of causal attention with 32 and 8 heads of 128. The efficiency is the "
        "time of one GPU, divided by the number of GPUs and by the time of the slowest of them. "
        "[More than one GPU](guides/multi-gpu.md) explains both exchanges."
    )
    title = "Efficiency of a step of attention over several GPUs: right is better"
    picture = partial(_dots, groups=groups, title=title, limit="linear")
    used = [r for r in chosen if any(_EFFICIENCY in row.values for row in r.rows)]
    return Answer("Attention over several GPUs", text, table, ("overview-shards", picture), used)


#: The value of a row that has the efficiency of a step.
_EFFICIENCY = "step_efficiency_share"


def _shard_cases(runs: Sequence[Result]) -> Iterator[tuple[Result, dict[str, Any], dict[str, Row]]]:
    """Yield the cases of attention over several GPUs, the same batches one after another.

    Of several runs with one case on one machine, only the newest counts.
    """
    newest: dict[tuple[Any, ...], tuple[Result, dict[str, Any], dict[str, Row]]] = {}
    for r in sorted(runs, key=lambda r: r.date):
        for case, rows in _cases(r, lambda row: "batch" in row.case and "model" not in row.case):
            if _EFFICIENCY in rows["scree"].values:
                newest[_short(r), case["batch"], case["processes"]] = r, case, rows
    order = list(dict.fromkeys(batch for _, batch, _ in newest))
    yield from sorted(
        newest.values(), key=lambda x: (order.index(x[1]["batch"]), x[1]["processes"], _short(x[0]))
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
            _short(r), case["batch"], str(case["processes"]),
            unit("step_s").show(base * case["processes"]), unit("step_s").show(scree["step_s"]),
            default, share(scree[_EFFICIENCY]), share(scree["forward_efficiency_share"]),
            *(share(efficiencies[x]) if x in efficiencies else "" for x in forms),
            share(base / peer) if peer else "",
            unit("received_bytes").show(scree.get("received_bytes", 0.0)),
        ])  # fmt: skip
    header = ["machine", "batch", "GPUs", "one GPU", "scree", "exchange", "efficiency", "forward",
              "by keys", "by heads", "best of ring-flash-attention", "received per GPU, forward"]  # fmt: skip
    return _table(header, lines)


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
            label = f"{case['model']}, {case['batch']}, {case['processes']} {_short(r)}"
            groups.setdefault(label, {})[mode] = row.values["efficiency_share"]
    text = (
        "Data parallel training has one batch per GPU. Context parallel training cuts one batch "
        "over all GPUs, and a mesh cuts each of its batches over some GPUs."
    )
    title = "Efficiency of training over several GPUs: right is better"
    picture = partial(_dots, groups=groups, title=title, limit="linear")
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
                _short(r), case["model"], case["batch"].replace("packed", f"{case['rows']} documents"),
                str(case["processes"]), row.who.removeprefix("scree, "), show(base[key]), show(rate),
                f"{rate / base[key]:.2f}", unit("efficiency_share").show(values["efficiency_share"]),
                unit("memory_bytes").show(memory) if memory else "",
                f"{values['loss_error']:.0e}",
            ]))  # fmt: skip
    lines = [line for _, line in sorted(keyed, key=lambda entry: entry[0])]
    header = ["machine", "model", "batch", "GPUs", "mode", "one GPU", "all GPUs", "over one GPU",
              "efficiency", "memory per GPU", "difference of losses"]  # fmt: skip
    return _table(header, lines)


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
                f"{devices} {_short(r)}", case["model"], batches[1] if batches else "1",
                re.sub("^scree, (data parallel, )?", "", row.who), unit("step_s").show(values["step_s"]),
                *(unit(name).show(values[name]) if name in values else "" for name in
                  ("efficiency_share", "memory_bytes", "loss_error")),
            ])  # fmt: skip
    header = ["GPUs", "model", "batches per GPU and step", "setting", "step", "efficiency",
              "memory per GPU", "difference of losses"]  # fmt: skip
    return _table(header, lines)


def shards_balance_table(runs: Sequence[Result]) -> results.Table:
    """Return the time of the slowest of several GPUs relative to their mean."""
    lines = [
        [
            _short(r), str(row.case["processes"]), row.who.removeprefix("scree, "),
            str(row.case["window"]), f"{row.values['slowest_rank_ratio']:.2f}",
        ]
        for r in runs for row in r.rows if "token_cost_value" in row.values
    ]  # fmt: skip
    return _table(["machine", "GPUs", "cost", "batches per window", "slowest over mean"], lines)


def guide_tables(runs: Sequence[Result]) -> dict[str, results.Table]:
    """Return the tables that guides name, as in ``<!-- table: shards-attention -->``."""
    chosen = [r for r in runs if r.command == "shards" and "gpu" in r.machine]
    return {
        "shards-attention": shards_attention_table(chosen),
        "shards-training": shards_training_table(chosen),
        "shards-settings": shards_settings_table(chosen),
        "shards-balance": shards_balance_table(chosen),
    }


def cpu(runs: Sequence[Result]) -> Answer | None:
    """Compare scree with the best form by hand in each library, on the CPU."""
    chosen = [r for r in runs if r.command == "ratios" or _is_cpu_throughput(r)]
    rows = [row for r in chosen for row in r.rows if row.who == "scree" and row.status == OK]
    rows = [row for row in rows if "what" in row.case]
    if not rows:
        return None
    libraries = list(dict.fromkeys(row.case["backend"] for row in rows))
    cells: dict[str, dict[str, str]] = {}
    groups: dict[str, dict[str, float]] = {}
    for what, library, quotient in _throughputs(chosen):
        groups.setdefault(what.replace(", against", "\nagainst"), {})[library] = quotient
        cells.setdefault(what, {})[library] = ratio(quotient, 1, "")
    for row in rows:
        what, library = row.case["what"], row.case["backend"]
        if "over_ratio" in row.values:
            quotient = row.values["over_ratio"]
            text = f"{quotient:.2f}"
            groups.setdefault(what.replace(", against", "\nagainst"), {})[library] = quotient
            lost = round(quotient, 2) > 1
        else:
            text = f"+{unit('over_s').show(row.values['over_s'])}"
            lost = row.values["over_s"] > 0
        cells.setdefault(what, {})[library] = bold(text) if lost else text
    table = _table(
        ["case", *libraries],
        [[what, *(line.get(name, "") for name in libraries)] for what, line in cells.items()],
    )
    text = (
        "NumPy, PyTorch, JAX and MLX on a CPU. Each case compares scree with the best form that a "
        "user would write by hand in the same library. The fastest peer is the best of padding, "
        "sorting, nested tensors and a loop over rows. *Over the bare call* is the additional time "
        "of one call."
    )
    title = "scree's time / the time by hand: left is faster"
    picture = partial(_dots, groups=groups, title=title, limit="as fast as by hand")
    return Answer("CPU", text, table, ("overview-cpu", picture), chosen)


def _is_cpu_throughput(result: Result) -> bool:
    return result.command == "throughput" and "gpu" not in result.machine


def _throughputs(runs: Sequence[Result]) -> Iterator[tuple[str, str, float]]:
    """Yield a case, its library, and the time of scree divided by the time of the fastest peer."""
    times: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    for row in (row for r in runs if _is_cpu_throughput(r) for row in r.rows):
        if "pass_s" in row.values:
            case = f"{row.case['operation']}, {row.case['batches']}, against the fastest peer"
            both = times.setdefault((case, row.case["backend"]), ([], []))
            both[not row.who.startswith("scree")].append(row.values["pass_s"])
    for (case, library), (scree, peers) in times.items():
        if scree and peers:
            yield case, library, min(scree) / min(peers)


def ratio(scree: float, peer: float | None, name: str) -> str:
    """Return scree's number divided by a peer's, in bold if it is a loss."""
    if not peer:
        return ""
    text = f"{scree / peer:.2f}"
    return bold(text) if is_loss(scree / peer, name) else text


def _cases(
    result: Result, among: Callable[[Row], bool] = lambda row: True
) -> Iterator[tuple[dict[str, Any], dict[str, Row]]]:
    """Yield each case with its rows by contender."""
    cases: dict[str, tuple[dict[str, Any], dict[str, Row]]] = {}
    for row in result.rows:
        if among(row) and row.status == OK and "phase" not in row.case:
            cases.setdefault(repr(row.case), (row.case, {}))[1].setdefault(row.who, row)
    yield from (pair for pair in cases.values() if "scree" in pair[1])


def _fastest(rows: dict[str, Row], value: str, scree: str = "scree") -> Row | None:
    """Return the fastest peer, or None if scree or all peers lack the value."""
    timed = [
        row
        for who, row in rows.items()
        if value in row.values and not who.startswith("scree") and who not in LIMITS
    ]
    if scree not in rows or value not in rows[scree].values:
        return None
    return min(timed, key=lambda row: row.values[value], default=None)


def _form(contender: str) -> str:
    return next(form for form in sorted(FORMS, key=len)[::-1] if contender.endswith(form))


def _table(header: list[str], lines: list[list[str]]) -> results.Table:
    return results.Table("", header, lines, [])


def _bars(figure: Any, groups: dict[str, dict[str, float]], kind: str, title: str) -> None:
    plots.bars(figure.add_subplot(), groups, kind, title, apart=True)


def _dots(figure: Any, groups: dict[str, dict[str, float]], title: str, limit: str) -> None:
    plots.dots(figure.add_subplot(), groups, title, limit)


# --- the pages per machine ---
def machine_names(runs: Sequence[Result]) -> dict[str, str]:
    """Return the name of the page of each machine, and the machine in words."""
    return {r.machine["tag"]: r.where for r in runs}


def machine_page(runs: Sequence[Result], tag: str, embed: Embed) -> str:
    """Return the page of one machine in Markdown. Tables and pictures are folded."""
    chosen = [r for r in runs if r.machine["tag"] == tag]
    about = chosen[0].machine
    parts = [
        f"# Results: {chosen[0].where}",
        f"{about['cpu']}, {about['cores']} cores, {about['system']}. "
        "[How it is measured](../bench.md#how-it-is-measured).",
    ]
    for result in chosen:
        parts += _section(result, embed)
    return "\n\n".join(parts) + "\n"


def _section(result: Result, embed: Embed) -> Iterator[str]:
    name = _run(result)
    yield f"## {name[0].upper()}{name[1:]}"
    yield _summary(result.command)
    yield f"`{command_line(result)}`, {result.date[:10]}; {_versions(result)}."
    if not result.complete:
        yield "The run was interrupted; these are the measurements until then."
    yield from result.extra.get("notes", [])
    if result.limits:
        yield f"Limits of the machine: {', '.join(result.limits)}."
    shown = [embed(*item) for item in plots.pictures(result).items()]
    if any(shown):
        yield fold(f"Pictures ({len(shown)})", "\n\n".join(shown))
    for table in plots.tables(result):
        title = f"Table of {len(table.lines)} lines"
        title += f": {table.caption}" if table.caption else ""
        yield fold(title, table._replace(caption="").markdown())
    if result.left_out:
        left_out = "\n".join(f"- {entry['what']}: {entry['why']}" for entry in result.left_out)
        yield fold("Not run", left_out.replace("<", "&lt;"))


def fold(title: str, body: str) -> str:
    """Return Markdown that the reader unfolds."""
    from html import escape

    return f'<details markdown="1">\n<summary>{escape(title)}</summary>\n\n{body}\n\n</details>'


# --- what all pages say about a run ---
def _run(result: Result) -> str:
    """Return the subcommand, and its part if it was run in several parts."""
    return f"{result.command}, {result.part}" if result.part else result.command


def _short(result: Result) -> str:
    """Return a short name of the machine: H100, CPU."""
    return str(result.machine["tag"]).upper()


def _link(result: Result, folder: str) -> str:
    anchor = re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", _run(result).lower()))
    return f"{folder}/{result.machine['tag']}.md#{anchor}"


def _versions(result: Result) -> str:
    return ", ".join(f"{name} {version}" for name, version in result.versions.items())


def command_line(result: Result) -> str:
    """Return the command line of a run, with the options that differ from their defaults."""
    command = import_module(f"scree_bench.commands.{result.command}").command
    parameters, hints = signature(command).parameters, get_type_hints(command, include_extras=True)
    arguments = ["scree-bench", result.command]
    for name, x in result.config.items():
        if name not in parameters or x is None or str(x) == str(parameters[name].default):
            continue
        # In an annotation, typer keeps the first name of an option as its default.
        named = [str(getattr(y, "default", None)) for y in get_args(hints[name])[1:]]
        option = next((y for y in named if y.startswith("--")), "--" + name.replace("_", "-"))
        if isinstance(x, bool):
            arguments.append(option if x else option.replace("--", "--no-", 1))
        else:
            arguments += [option, str(x)]
    return shlex.join(arguments)


def _summary(command: str) -> str:
    """Return the first line of the help text of a subcommand."""
    module = import_module(f"scree_bench.commands.{command}")
    return (getdoc(module.command) or "").partition("\n")[0]


def _commands() -> str:
    lines = ["## The commands", "", "| command | what it shows |", "|---|---|"]
    return "\n".join(lines + [f"| `scree-bench {name}` | {_summary(name)} |" for name in MEASURING])
