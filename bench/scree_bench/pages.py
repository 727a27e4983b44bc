"""The pages of benchmarks: an overview with one table per question, and one page per machine.

`shard_pages` answers the questions about several GPUs. A page is Markdown. The caller decides what a
picture becomes: a file, or a part of the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from inspect import getdoc
from pathlib import Path

from . import plots, results
from .commands import MEASURING
from .page_parts import (
    FORMS,
    Answer,
    command_line,
    draw_bars,
    draw_dots,
    fastest_row,
    fold,
    form_of,
    iterate_cases,
    link_to,
    make_table,
    ratio,
    run_name,
    short_name,
    versions_of,
)
from .results import LIMITS, OK, Result, Row, bold, is_loss, unit
from .shard_pages import shards, shards_training

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
    runs.sort(key=lambda r: (r.machine.get("gpu") is None, MEASURING.index(r.command), run_name(r)))
    return runs, messages


# --- the overview ---


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
    for _, name in sorted({(MEASURING.index(r.command), run_name(r)) for r in runs}):
        dates = {
            r.where: f"[{r.date[:10]}]({link_to(r, folder)})" for r in runs if run_name(r) == name
        }
        lines.append(f"| {name} | {' | '.join(dates.get(where, '') for where in machines)} |")
    yield "\n".join([header, *lines])


def _sources(runs: Sequence[Result], folder: str) -> str:
    """Return the provenance of a table: the machine, the command, the date and the versions."""
    return fold("Machines, commands, dates and versions", "\n".join(
        f"- [{r.where}]({link_to(r, folder)}): `{command_line(r)}`, {r.date[:10]}; {versions_of(r)}."
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
        for case, rows in iterate_cases(r, lambda row: "work" in row.case):
            for phase, words in phases.items():
                value, scree = f"{phase}_s", rows.get("scree")
                if scree is None or value not in scree.values:
                    continue
                times = {who: row.values[value] for who, row in rows.items() if value in row.values}
                cells = [ratio(times["scree"], times.get(peer), peer) for peer in peers]
                label = f"{case['work']}, {case['dtype']}"
                shown = unit(value).show(times["scree"])
                lines.append([short_name(r), label, words, shown, *cells])
                if r is chosen[0] and phase == "both":
                    share = scree.values.get("both_share")
                    # Float32 has no limit: scree uses other tensor cores than PyTorch's products.
                    limit = {"limit": times["scree"] * share} if share and share < 1 else {}
                    known = {name: times[who] for who, name in peers.items() if who in times}
                    groups[label] = {"scree": times["scree"], **known, **limit}
    if not lines:
        return None
    title = (
        f"{short_name(chosen[0])}: attention with gradients, less is better, one scale per workload"
    )
    header = ["machine", "workload", "", "scree", *(f"/ {name}" for name in peers.values())]
    text = (
        "Causal attention on rows of different lengths, relative to FlashAttention-2, -3 and -4. "
        "*Efficient* is PyTorch's memory-efficient attention on packed rows. "
        "The limit is a large matrix product of the same dtype. "
        "[Speed of attention](attention-speed.md) describes the workloads."
    )
    picture = partial(draw_bars, groups=groups, kind="both_s", title=title)
    return Answer(
        "Attention", text, make_table(header, lines), ("overview-attention", picture), chosen
    )


def decode(runs: Sequence[Result]) -> Answer | None:
    """Compare attention to a paged cache with its peers."""
    chosen = [r for r in runs if r.command == "decode"]
    peers: dict[str, None] = {}
    cases = []
    for r in chosen:
        for case, rows in iterate_cases(r, lambda row: row.case["kind"] == "decode"):
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
            short_name(r), label, unit("call_s").show(times["scree"]),
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
    title = (
        f"{short_name(chosen[0])}: decoding from a paged cache, less is better, one scale per case"
    )
    picture = partial(draw_bars, groups=groups, kind="call_s", title=title)
    return Answer("Decoding", text, make_table(header, lines), ("overview-decode", picture), chosen)


def kernels(runs: Sequence[Result]) -> Answer | None:
    """Compare the other kernels with the fastest peer on GPUs."""
    chosen = [
        r for r in runs if r.command in ("kernels", "norms") and "gpu" in r.machine and not r.part
    ]
    machines = list(dict.fromkeys(map(short_name, chosen)))
    lines: dict[str, dict[str, str]] = {}
    groups: dict[str, dict[str, float]] = {}
    for r in chosen:
        for case, rows in iterate_cases(r):
            batch = case.get("batch", f"width {case['width']:,}" if "width" in case else "")
            name = f"{case['operation']}, {batch}" if batch != "text" else case["operation"]
            for phase in ("forward", "both"):
                best = fastest_row(rows, f"{phase}_s")
                if best is not None:
                    quotient = rows["scree"].values[f"{phase}_s"] / best.values[f"{phase}_s"]
                    words = f"{quotient:.2f}, {best.who}"
                    text = bold(words) if is_loss(quotient, best.who) else words
                    lines.setdefault(name, {})[f"{short_name(r)} {phase}"] = text
                    # The picture has texts, with gradients where there are any.
                    if case.get("batch", "text") == "text":
                        groups.setdefault(name, {})[short_name(r)] = quotient
    if not lines:
        return None
    columns = {f"{m} {p}": f"{m}, {words}" for m in machines for p, words in
               (("forward", "forward"), ("both", "with gradients"))}  # fmt: skip
    table = make_table(
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
    picture = partial(draw_dots, groups=groups, title=title, limit="as fast as the fastest peer")
    return Answer("Other kernels", text, table, ("overview-kernels", picture), chosen)


def training(runs: Sequence[Result]) -> Answer | None:
    """Compare a transformer block and training steps with the fastest peer in the same form."""
    chosen = [r for r in runs if r.command in ("block", "model")]
    # The first machine is a GPU, if there is one.
    drawn = chosen[0].machine.get("gpu") if chosen else None
    lines, groups = [], {}
    for r in chosen:
        value = "both_s" if r.command == "block" else "step_s"
        for case, rows in iterate_cases(
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
                rivals = {who: row for who, row in rows.items() if form_of(who) == form}
                best = fastest_row(rivals, value, f"scree{form}")
                if scree is None or best is None:
                    continue
                time, peak = scree.values[value], "backward_peak_bytes"
                memory = scree.values.get(peak), best.values.get(peak)
                lines.append([
                    short_name(r), name, form.removeprefix(", ") or "eager", unit(value).show(time),
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
    title = f"{short_name(chosen[0])}: a block and a training step, less is better, one scale each"
    picture = partial(draw_bars, groups=groups, kind="both_s", title=title)
    return Answer(
        "Training", text, make_table(header, lines), ("overview-training", picture), chosen
    )


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
        cases.setdefault((short_name(r), label), {})[row.who] = row
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
    picture = partial(draw_bars, groups=groups, kind="real_tokens", title=title)
    return Answer(
        "Training on documents",
        text,
        make_table(header, lines),
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
    table = make_table(
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
    picture = partial(draw_dots, groups=groups, title=title, limit="as fast as by hand")
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
    name = run_name(result)
    yield f"## {name[0].upper()}{name[1:]}"
    yield _summary(result.command)
    yield f"`{command_line(result)}`, {result.date[:10]}; {versions_of(result)}."
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


def _summary(command: str) -> str:
    """Return the first line of the help text of a subcommand."""
    module = import_module(f"scree_bench.commands.{command}")
    return (getdoc(module.command) or "").partition("\n")[0]


def _commands() -> str:
    lines = ["## The commands", "", "| command | what it shows |", "|---|---|"]
    return "\n".join(lines + [f"| `scree-bench {name}` | {_summary(name)} |" for name in MEASURING])
