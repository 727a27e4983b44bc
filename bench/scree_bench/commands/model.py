"""`model`: time and memory of GPT-2 training steps by phase, ragged and padded."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Annotated, Any

import numpy as np
import typer

from .. import gpt, llama, plots, results
from .. import lengths as draws
from ..libraries import allocations, resolve_device, torch_compiled
from ..measure import Failure, require
from ..options import Device, Lengths, Out, Quick, Seed, parse_numbers, parse_words
from ..results import OK, Result, Row, Table, unit
from ..session import Session
from ..work import BACKWARD

PHASES = ("forward", "backward", "optimizer")
#: Numbers of warm-up steps that a mean excludes.
WARM_UPS = (0, 1, 5)
#: Maximum points of a timeline.
POINTS = 100
PRECISIONS = {"fp32": "fp32", "tf32": "tf32", "bf16": "bf16 autocast"}
#: Precision -> data type whose peak of matrix products is the limit.
LIMITS = {"fp32": "float32", "bf16 autocast": "bfloat16"}

#: Class -> pattern in the names of its kernels; the first match counts. The remaining kernels are
#: norms, softmax and reductions.
CLASSES = {
    "attention": "attention|flash|fmha|sdpa",
    "matmul": "(^|[^a-z])(add|badd|b)?mm([^a-z]|$)|gemm|matmul|linear(?!_cross)|grouped|cutlass|nvjet",
    "copies": "copy|memcpy|cat|index|gather|scatter|fill|zero|memset|embedding|clone",
    "elementwise": "elementwise|gelu|add|mul|div|sub|multi_tensor|adam",
}


class TrainingStep:
    """Training step of one contender, phase by phase; the state persists between steps."""

    def __init__(
        self,
        size: gpt.Size,
        batch: gpt.Batch,
        max_length: int,
        device: str,
        precision: str,
        compiled: bool,
        seed: int,
    ):
        import torch

        self.torch, self.device = torch, device
        self.loss: Any = None
        self.weights = gpt.weights(size, max_length, device, seed)
        self.optimizer = torch.optim.AdamW(
            self.weights.values(), lr=1e-4, fused=device == "cuda" or None
        )
        run = torch_compiled(gpt.loss) if compiled else gpt.loss
        bf16 = precision == "bf16 autocast"

        def forward() -> None:
            with torch.autocast(device, torch.bfloat16) if bf16 else nullcontext():
                self.loss = run(self.weights, size, *batch)

        def backward() -> None:
            self.loss.backward()

        def optimizer() -> None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

        self.phases: dict[str, Callable[[], None]] = {
            "forward": forward,
            "backward": backward,
            "optimizer": optimizer,
        }

    def run(self, name: str) -> float:
        """Return the seconds of a phase, by the host's clock, from idle device to idle device."""
        self.wait()
        start = time.perf_counter()
        with self._marked(name):
            self.phases[name]()
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    @contextmanager
    def _marked(self, name: str) -> Iterator[None]:
        """Mark a range that Nsight shows."""
        if self.device != "cuda":
            yield
            return
        self.torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            self.torch.cuda.nvtx.range_pop()


def command(
    sizes: Annotated[
        str, typer.Option(help=f"Some of {', '.join(gpt.SIZES)}; small on CUDA, mini on the CPU.")
    ] = "",
    contexts: Annotated[
        str,
        typer.Option(help="Median lengths of the rows; 128,256,512 on CUDA, 64,128 on the CPU."),
    ] = "",
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 4,
    sigma: Annotated[
        float, typer.Option(min=0, help="Standard deviation of the log lengths; 0 makes all equal.")
    ] = 0.6,
    lengths: Lengths = None,
    precisions: Annotated[
        str, typer.Option(help="fp32, tf32 (only on CUDA), bf16 (autocast).")
    ] = "fp32,tf32,bf16",
    compiled: Annotated[bool, typer.Option("--compiled", help="Add compiled forms.")] = False,
    depths: Annotated[
        str,
        typer.Option(
            help="Layers of a compiled Llama-like model, measured instead of GPT-2: 2,12,32."
        ),
    ] = "",
    steps: Annotated[
        int, typer.Option(min=1, help="Measured steps, after five warm-up steps.")
    ] = 10,
    device: Device = "auto",
    seed: Seed = 0,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Measure time and memory of GPT-2 training steps, ragged and padded, by phase and kernel.

    The phases are forward, backward and optimizer. Both forms start from the same weights, so their
    first losses must agree. Means are after 0, 1 and 5 warm-up steps; the spread is after 5. The
    peak of each phase is relative to the memory held before the step. The share of the limit is the
    rate of operations on real tokens relative to this machine's peak for matrix products.

    With --depths: the compile time and the step of a Llama-like model by depth, on ragged arrays, on
    packed tokens with PyTorch's varlen_attn, and padded.
    """
    with Session("model", locals(), resolve_device(device)) as session:
        if find_spec("torch") is None:
            return session.leave_out("model", "needs PyTorch, which is not installed")
        if depths:
            total = 256 if quick or session.device == "cpu" else 16_384
            for depth in session.track(parse_numbers(depths, "--depths")):
                _measure_depth(session, depth, total, steps, seed)
            return None
        sizes = sizes or ("small" if session.device == "cuda" else "mini")
        contexts = contexts or ("128,256,512" if session.device == "cuda" else "64,128")
        chosen, medians = (
            parse_words(sizes, "--sizes", gpt.SIZES),
            parse_numbers(contexts, "--contexts"),
        )
        selected = parse_words(precisions, "--precisions", PRECISIONS)
        if quick:
            chosen, medians, steps = ["tiny"], [24], 3
        file_lengths = draws.read(lengths)[:batch] if lengths else None
        medians = medians if file_lengths is None else [int(np.median(file_lengths))]
        cases = itertools.product(chosen, medians, selected)
        session.result.extra = {"timelines": {}, "kernels": {}}
        for name, median, precision in session.track(cases):
            if precision == "tf32" and session.device != "cuda":
                session.leave_out("tf32", "exists on CUDA devices only")
                continue
            rng = np.random.default_rng(seed)
            counts = file_lengths
            if counts is None:
                counts = draws.lognormal(batch, median, sigma, rng)
            rows = [rng.integers(0, gpt.SIZES[name].vocabulary, int(n)) for n in counts]
            case = {
                "size": name,
                "precision": PRECISIONS[precision],
                "rows": len(rows),
                "tokens": int(counts.sum()),
                "longest": int(counts.max()),
            }
            _measure(session, case, rows, compiled, steps, seed)
    return None


def _measure(
    session: Session,
    case: dict[str, Any],
    rows: list[np.ndarray],
    compiled: bool,
    steps: int,
    seed: int,
) -> None:
    import torch

    device, size, max_length = session.device, gpt.SIZES[case["size"]], case["longest"]
    torch.backends.cuda.matmul.allow_tf32 = case["precision"] == "tf32"
    running: dict[str, TrainingStep] = {}
    for form, make in (("scree", gpt.ragged), ("padded", gpt.padded)):
        for compile_it in (False, True) if compiled else (False,):
            contender = f"{form}, compiled" if compile_it else form
            try:
                require(16.0 * size.parameters, device)
                running[contender] = TrainingStep(
                    size,
                    make(rows, device),
                    max_length,
                    device,
                    case["precision"],
                    compile_it,
                    seed,
                )
            # A failure, such as a lack of memory, is a result; the other contenders still run.
            except Exception as error:
                session.row(case, contender).add("step_s", Failure.of(error))
    times: dict[str, dict[str, list[float]]] = {
        contender: {phase: [] for phase in PHASES} for contender in running
    }
    try:
        for number in range(max(WARM_UPS) + steps):
            for contender in list(running):
                try:
                    for phase in PHASES:
                        times[contender][phase].append(running[contender].run(phase))
                    if number == 0:
                        session.row(case, contender).values["first_loss_value"] = float(
                            running[contender].loss.detach()
                        )
                # The other contenders still run.
                except Exception as error:
                    session.row(case, contender).add("step_s", Failure.of(error))
                    del running[contender]
    # After an interrupt too.
    finally:
        for contender in running:
            _summarize(session.row(case, contender), times[contender])
    for contender, step in running.items():
        row = session.row(case, contender)
        row.values["real_tokens"] = case["tokens"] / row.values["step_s"]
        if peak := session.limits().get(f"matmul_{LIMITS.get(case['precision'])}_flops"):
            row.values["of_limit_share"] = step_flops(size, rows) / row.values["step_s"] / peak
        try:
            _memory(session, row, step)
            _profile(session, row, step)
        # The other contenders still run.
        except Exception as error:
            row.add("profile", Failure.of(error))


def _measure_depth(session: Session, depth: int, total: int, steps: int, seed: int) -> None:
    """Measure the first step of compiled models, which compiles, and later steps."""
    import torch

    size, rng = llama.SIZES[session.device], np.random.default_rng(seed)
    lengths = draws.lognormal_with_total(max(4, total // 400), total, rng)
    rows = [rng.integers(0, size.vocabulary, int(n)) for n in lengths]
    case = {"layers": depth, "tokens": total, "rows": len(rows), "longest": int(lengths.max())}
    for name, form in llama.FORMS.items():
        row = session.row(case, name)
        if name == "varlen_attn" and session.device != "cuda":
            session.leave_out(name, "exists on CUDA devices only")
            continue
        try:
            torch._dynamo.reset()
            weights = llama.parameters(size, depth, session.device, seed)
            loss = torch_compiled(form(size, depth, rows, session.device))
            seconds = []
            for _ in range(1 + max(WARM_UPS) + steps):
                _wait(session.device)
                start = time.perf_counter()
                value = loss(weights)
                value.backward()
                _wait(session.device)
                seconds.append(time.perf_counter() - start)
                for weight in weights.values():
                    weight.grad = None
            row.values["compile_s"] = seconds[0]
            row.values["first_loss_value"] = float(value.detach())
            row.add("step_s", seconds[1 + max(WARM_UPS) :])
            row.values["real_tokens"] = total / row.values["step_s"]
        # A failure, such as a lack of memory, is a result; the other contenders still run.
        except Exception as error:
            row.add("step_s", Failure.of(error))


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def step_flops(size: gpt.Size, rows: list[np.ndarray]) -> float:
    """Return the operations that every form of a step needs.

    They are products of weights and real tokens, and causal attention.
    """
    tokens, pairs = sum(map(len, rows)), sum(len(row) * (len(row) + 1) / 2 for row in rows)
    return 6.0 * size.parameters * tokens + (1 + BACKWARD) * 4.0 * size.layers * size.width * pairs


def _summarize(row: Row, times: dict[str, list[float]]) -> None:
    """Add the times of whole steps, if there are any after the warm-up."""
    every = [sum(parts) for parts in zip(*times.values(), strict=False)]
    last = max(WARM_UPS)
    if len(every) <= last:
        return
    row.add("step_s", every[last:])
    for phase in PHASES:
        row.add(f"{phase}_s", times[phase][last : len(every)])
    for count in WARM_UPS:
        row.values[f"mean_after_{count}_s"] = statistics.fmean(every[count:])
    deviation = statistics.stdev(every[last:]) if len(every) > last + 1 else 0.0
    row.values |= {"deviation_s": deviation, "cv_share": deviation / statistics.fmean(every[last:])}


def _memory(session: Session, row: Row, step: TrainingStep) -> None:
    """Add the peak of each phase, and the timeline of memory held through a whole step."""
    line: list[list[float]] = []
    base, start = 0, 0.0
    for phase in PHASES:
        events = (
            _cuda_allocations(step, phase)
            if session.device == "cuda"
            else allocations(step.phases[phase])[0]
        )
        row.values[f"{phase}_peak_bytes"] = float(
            base + max((held for _, held in events), default=0)
        )
        line += [[start + at, base + held, PHASES.index(phase)] for at, held in events]
        base, start = (int(line[-1][1]), line[-1][0]) if line else (base, start)
    session.result.extra["timelines"][_label(row)] = line[:: max(1, len(line) // POINTS)]


def _cuda_allocations(step: TrainingStep, phase: str) -> list[tuple[float, int]]:
    """Return seconds and bytes held after each event of PyTorch's memory snapshot."""
    memory = step.torch.cuda.memory
    # Without stack traces, which are slow to record.
    memory._record_memory_history(context=None, max_entries=1_000_000)
    step.run(phase)
    events = memory._snapshot()["device_traces"][step.torch.cuda.current_device()]
    memory._record_memory_history(enabled=None)
    held, line = 0, []
    for event in events:
        held += {"alloc": 1, "free_completed": -1}.get(event["action"], 0) * event["size"]
        line.append(((event["time_us"] - events[0]["time_us"]) / 1e6, held))
    return line


def _profile(session: Session, row: Row, step: TrainingStep) -> None:
    """Add the share of each kernel class in a phase, and the slowest kernels."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    cuda = session.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    for phase in PHASES:
        with profile(activities=activities) as profiled:
            step.run(phase)
        kernel_times = {
            e.key: (e.self_device_time_total if cuda else e.self_cpu_time_total) / 1e6
            for e in profiled.key_averages()
            if not cuda
            or (e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False))
        }
        total = sum(kernel_times.values()) or 1.0
        shares = dict.fromkeys((*CLASSES, "other"), 0.0)
        for name, seconds in kernel_times.items():
            shares[classify(name)] += seconds / total
        phase_row = session.row({**row.case, "phase": phase}, row.who)
        phase_row.values |= {f"{name}_share": share for name, share in shares.items()}
        slowest = sorted(kernel_times.items(), key=lambda item: -item[1])[:10]
        session.result.extra["kernels"][f"{_label(row)}, {phase}"] = [
            [name[:120], seconds] for name, seconds in slowest
        ]


def classify(kernel: str) -> str:
    """Return the class of a kernel, by its name."""
    name = kernel.lower()
    return next((kind for kind, pattern in CLASSES.items() if re.search(pattern, name)), "other")


def tables(result: Result) -> list[Table]:
    """Return times and memory per case, shares per phase, and the last case's slowest kernels."""
    shown = results.tables(result.rows)
    last = list(result.extra.get("kernels", {}).items())[-len(PHASES) :]
    for name, kernels in last:
        lines = [[kernel, unit("self_s").show(seconds)] for kernel, seconds in kernels]
        shown.append(Table(f"slowest kernels, {name}", ["kernel", "self time"], lines, []))
    return shown


def _label(row: Row) -> str:
    return f"{row.case['size']}, {row.case['precision']}, longest {row.case['longest']}, {row.who}"


def pictures(result: Result) -> plots.Pictures:
    """Return pictures of the time by phase, and of the memory through a step."""
    rows = [row for row in result.rows if "forward_s" in row.values and row.status == OK]
    lines = result.extra.get("timelines", {})

    def phases(figure: Any) -> None:
        axes, label, left = figure.add_subplot(), plots.labels(rows, "tokens"), np.zeros(len(rows))
        for phase, color in zip(PHASES, plots.PEERS, strict=False):
            seconds = np.asarray([row.values[f"{phase}_s"] for row in rows])
            axes.barh(range(len(rows)), seconds, 0.5, left, label=phase, color=color)
            left += seconds
        for i, row in enumerate(rows):
            name = ", ".join(filter(None, (label(row).replace("\n", ", "), row.who)))
            axes.text(0, i - 0.3, name, va="bottom", fontsize=8.5)
        axes.set(yticks=[], ylim=(len(rows) - 0.5, -0.9))
        axes.xaxis.set_major_formatter(lambda v, _: unit("x_s").show(v) if v else "0")
        axes.grid(visible=False, axis="y")
        figure.suptitle("A training step, by phase: less is better")
        figure.set_size_inches(plots.SIZE[0], 0.8 + 0.36 * len(rows))

    def timeline(figure: Any) -> None:
        axes = figure.add_subplot()
        for name, points in list(lines.items())[-4:]:
            axes.plot([p[0] for p in points], [p[1] for p in points], label=name, linewidth=1.2)
        axes.set(
            title="Memory held through a step, relative to the start", xlabel="seconds, as profiled"
        )
        axes.yaxis.set_major_formatter(lambda v, _: unit("x_bytes").show(v) if v else "0")
        axes.legend()

    return {"model-phases": phases, "model-memory": timeline} if rows else {}
