"""`train`: language models trained from random weights on documents, packed and padded."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer

from .. import plots, results
from ..libraries import resolve_device
from ..measure import PATIENCE, Failure, time_limit
from ..options import Device, Out, Patience, Quick, Seed, parse_words
from ..results import OK, Result, Row, Table, unit
from ..session import Session
from ..training import heads, profile
from ..training.forms import FORMS, REFERENCE, Plan, unavailable
from ..training.jax_loop import JaxTraining
from ..training.loop import PRECISIONS, Settings, Training, compiled_graphs, release
from ..training.models import RECOMPUTE, SIZES
from ..training.text import Batches, Documents, load, save

#: Peak of products in bfloat16 without sparsity, as the vendor states it.
PEAKS = {"h100": 989e12, "h200": 989e12, "a100": 312e12}
#: Warm-up steps after the first step, before the timed steps.
WARM_UPS = 5
#: Points of a loss curve, and the share of its last steps whose mean is the final loss.
POINTS, FINAL_SHARE = 200, 0.05
#: Seconds between two lines of progress.
PROGRESS_SECONDS = 10.0
MODES = {"eager": False, "compiled": True}
_MODES_OF = {f"{form}:{mode}": (form, mode) for form in FORMS for mode in MODES}
SHOWN = (
    "real_tokens",
    "mfu_share",
    "step_s",
    "host_s",
    "peak_bytes",
    "first_step_s",
    "first_loss_value",
    "warm_loss_value",
)


def command(
    size: Annotated[
        str, typer.Option(help=f"One of {', '.join(SIZES)}; 124m on CUDA, tiny on the CPU.")
    ] = "",
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            help="File with one document per paragraph, folder with one per file, or .npz of "
            "--save-tokens. Default: chatterbot-corpus, or the sources of Python's library.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(exists=True, help="tokenizer.json; by default an encoding is trained."),
    ] = None,
    save_tokens: Annotated[
        Path | None, typer.Option(help="Write the tokens into this .npz file.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=8, help="Tokens per batch; 32,768 on CUDA, 1,024 on the CPU.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=2, help="Longest document; longer ones are cut. 2,048, or 128 on the CPU."
        ),
    ] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches per step.")] = 1,
    contenders: Annotated[str, typer.Option(help=f"Some of {', '.join(FORMS)}, or all.")] = "all",
    modes: Annotated[str, typer.Option(help="eager, compiled.")] = "eager,compiled",
    loss: Annotated[
        str,
        typer.Option(
            help=f"Loss of the peers: auto, {', '.join(heads.HEADS)}; auto is Liger's, if there."
        ),
    ] = "auto",
    precision: Annotated[
        str,
        typer.Option(
            help="amp: float32 weights and bfloat16 products; bf16: all in bfloat16; fp32. "
            "Default: amp on CUDA, fp32 on the CPU."
        ),
    ] = "",
    timed: Annotated[int, typer.Option(min=0, help="Timed steps of every contender.")] = 50,
    steps: Annotated[
        int, typer.Option(min=0, help="Steps of the loss curves of scree and of the reference.")
    ] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the loss curves.")] = 1,
    curves: Annotated[
        str, typer.Option(help="Contenders with a loss curve.")
    ] = f"scree,{REFERENCE}",
    rate: Annotated[
        float | None, typer.Option(min=0, help="Highest learning rate; by default of the size.")
    ] = None,
    warm_up: Annotated[
        int | None, typer.Option(min=0, help="Steps of linear warm-up; a tenth by default.")
    ] = None,
    clip: Annotated[
        float, typer.Option(min=0, help="Largest norm of the gradient; 0: none.")
    ] = 1.0,
    recompute: Annotated[
        str,
        typer.Option(
            help=f"What the backward pass computes again, to save memory: {', '.join(RECOMPUTE)}."
        ),
    ] = "nothing",
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Folder for checkpoints of the loss curves; a run resumes from it."),
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 200,
    profiled: Annotated[
        bool,
        typer.Option(
            "--profile", help="Also list where the time of a step goes, and the host's time."
        ),
    ] = False,
    device: Device = "auto",
    seed: Seed = 0,
    patience: Patience = PATIENCE,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Train language models on documents of any length: scree, packed peers, windows and padding.

    All contenders start from the same weights and get the same documents in the same order. Every
    contender makes a few timed steps. With --steps, scree and length-sorted padding also train
    for that many steps, for the curves of their losses. Memory that runs out is a result. The steps
    of JAX are timed by the clock of the host, and their memory includes what its compiler tries out.

    MFU counts 6 operations per parameter and real token, and attention of real pairs. Neither
    padding nor recomputation counts. The peak is 989 TFLOP/s on H100 and H200, or else the measured
    rate of matrix products.
    """
    with Session("train", locals(), resolve_device(device)) as session:
        for module in ("torch", "tokenizers"):
            if find_spec(module) is None:
                return session.leave_out("train", f"needs {module}, which is not installed")
        # By default JAX reserves three quarters of the GPU's memory, which PyTorch needs too.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        cuda = session.device == "cuda"
        size = _one(size or ("124m" if cuda else "tiny"), "--size", SIZES)
        recompute = _one(recompute, "--recompute", RECOMPUTE)
        precision = _one(precision or ("amp" if cuda else "fp32"), "--precision", PRECISIONS)
        head = heads.choose(_one(loss, "--loss", ("auto", *heads.HEADS)), session.device)
        with_curve = parse_words(curves, "--curves", FORMS)
        selected = parse_words(modes, "--modes", MODES)
        tokens = tokens or (32_768 if cuda else 1024)
        context = context or (2048 if cuda else 128)
        names = parse_words(contenders, "--contenders", ("all", *FORMS, *_MODES_OF))
        if quick:
            timed, tokens, context, selected = min(timed, 3), 256, 64, ["eager"]
        shape = SIZES[size]
        context = min(context, tokens, shape.positions or context)
        session.say(f"{size}: {tokens:,} tokens per batch, documents of up to {context:,} tokens")
        start = perf_counter()
        documents = load(text, tokenizer, shape.vocabulary, context)
        session.say(_about(documents, perf_counter() - start))
        session.result.extra |= {"source": documents.source, "curves": {}, "profiles": {}}
        if save_tokens is not None:
            save(documents, save_tokens)
        total_steps = max(steps, 1 + WARM_UPS + timed)
        # Steps that compile are run again, up to as many as are timed, and the profiler runs more.
        most_steps = max(steps, 1 + WARM_UPS + 2 * timed + 2 * profile.STEPS)
        most = max(
            Batches(documents, tokens, s).max_rows(accumulate * most_steps)
            for s in range(seed, seed + seeds)
        )
        plan = Plan(shape, tokens, -(-most // 8) * 8, context, recompute)
        settings = Settings(
            plan=plan,
            device=session.device,
            precision=precision,
            accumulate=accumulate,
            steps=steps or total_steps,
            warm_up=max(1, total_steps // 10) if warm_up is None else warm_up,
            rate=rate or shape.rate,
            clip=clip,
            seed=seed,
        )
        case = {
            "size": size,
            "precision": precision,
            "tokens": settings.step_tokens,
            "context": context,
            "loss": head,
        }
        runs = []
        for name in FORMS if "all" in names else names:
            form, mode = _MODES_OF.get(name, (name, ""))
            if reason := unavailable(FORMS[form], shape, session.device):
                session.leave_out(form, reason)
            elif FORMS[form].on_jax:
                runs.append((form, "compiled"))
            else:
                runs += [(form, x) for x in ([mode] if mode else selected)]
        if timed:
            for form, mode in session.track(runs, "timed steps"):
                run = _Run(session, settings, documents, form, mode, head)
                run.time({**case, "part": "timed"}, timed, profiled)
                release(compiled=True)
        if steps:
            mode = selected[-1]
            for form in session.track(with_curve, "loss curves"):
                for number in range(seed, seed + seeds):
                    run = _Run(session, settings._replace(seed=number), documents, form, mode, head)
                    folder = checkpoint and checkpoint / f"{form.replace(' ', '-')}-seed-{number}"
                    run.train(
                        {**case, "part": "curve", "seed": number}, steps, folder, checkpoint_every
                    )
                    release(compiled=False)
                release(compiled=True)
    return None


def _one(word: str, option: str, among: Collection[str]) -> str:
    """Return the word of an option that takes one."""
    chosen = parse_words(word, option, among)
    if len(chosen) != 1:
        raise typer.BadParameter(f"{option}: expected one of {', '.join(among)}, got {word!r}")
    return chosen[0]


def _about(documents: Documents, seconds: float) -> str:
    lengths = documents.lengths
    return (
        f"text: {documents.source}: {len(lengths):,} documents, {lengths.sum():,} tokens, "
        f"median {np.median(lengths):,.0f}, longest {lengths.max():,}; read in {seconds:.1f} s"
    )


class _Run:
    """One contender: its timed steps, or its training."""

    def __init__(
        self,
        session: Session,
        settings: Settings,
        documents: Documents,
        form: str,
        mode: str,
        head: str,
    ) -> None:
        self.session, self.settings = session, settings
        self.who = f"{form}, compiled" if MODES[mode] else form
        self.arguments = (settings, documents, form, MODES[mode], head)
        self.on_jax = FORMS[form].on_jax

    def _start(self) -> Training | JaxTraining:
        return JaxTraining(*self.arguments) if self.on_jax else Training(*self.arguments)

    def time(self, case: dict[str, Any], timed: int, profiled: bool) -> None:
        """Add the seconds of the timed steps, the rate of real tokens, and the peak of memory."""
        row = self.session.row(case, self.who)
        training: Any
        step: Any
        first: Any
        try:
            training, begin = self._start(), perf_counter()
            with time_limit(self.session.patience):
                first = training.run()
                row.values["first_loss_value"] = float(first.loss)
                training.wait()
            row.values["first_step_s"] = perf_counter() - begin
            for _ in range(1 if self.session.quick else WARM_UPS):
                step = training.run()
            row.values["warm_loss_value"] = float(step.loss)
            training.wait()
            training.reset_peak()
            spans: list[tuple[Any, Any]] = []
            flops: list[float] = []
            end = training.now()
            try:
                # A step with a new shape compiles; other steps are timed in its place.
                for _ in range(2 * timed):
                    start, graphs = end, compiled_graphs()
                    step = training.run()
                    end = step.end
                    if compiled_graphs() == graphs:
                        spans.append((start, end))
                        flops.append(step.flops)
                    if len(spans) == timed:
                        break
            # After an interrupt too.
            finally:
                training.wait()
                self._add_times(row, training, spans, flops)
            if (peak_bytes := training.peak_bytes()) is not None:
                row.values["peak_bytes"] = peak_bytes
            if profiled and isinstance(training, Training):
                row.add("host_s", profile.host_seconds(training))
                label = f"{case['size']}, {self.who}"
                self.session.result.extra["profiles"][label] = profile.breakdown(training)
        # A failure, such as a lack of memory, is a result; the other contenders still run.
        except Exception as error:
            row.add("step_s", Failure.of(error))
        # Frees the memory of the device for the next contender.
        finally:
            training = step = first = None
        self.session.say(_line(row))
        self.session.save()

    def _add_times(
        self,
        row: Row,
        training: Training | JaxTraining,
        spans: Sequence[tuple[Any, Any]],
        flops: Sequence[float],
    ) -> None:
        seconds = [training.seconds(*span) for span in spans]
        if seconds:
            row.add("step_s", seconds)
            row.values["real_tokens"] = self.settings.step_tokens * len(seconds) / sum(seconds)
            row.values["mfu_share"] = sum(flops) / sum(seconds) / self._peak()

    def _peak(self) -> float:
        if self.settings.precision != "fp32":
            peak = PEAKS.get(self.session.result.machine["tag"])
            if peak:
                return peak
        return self.session.limits()["matmul_float32_flops"]

    def train(
        self, case: dict[str, Any], steps: int, folder: Path | None, checkpoint_every: int
    ) -> None:
        """Train for a number of steps, and keep the curve of the loss."""
        row = self.session.row(case, self.who)
        pending: list[Any] = []
        losses: list[float] = []
        times: list[tuple[int, float]] = []
        training: Any
        step: Any
        try:
            training = self._start()
            seconds_before = 0.0
            if folder is not None:
                losses, seconds_before = training.resume(folder)
                times = [(len(losses), seconds_before)]
            if losses:
                self.session.say(f"{self.who}: resumed after step {len(losses)}")
            if training.step < steps:
                # The first step compiles; the clock starts after it.
                pending.append(training.run().loss)
                training.wait()
            start = last = perf_counter()
            first, flops = training.step, 0.0

            def collect() -> float:
                """Read the losses of the device, and return the seconds so far."""
                losses.extend(float(x) for x in pending)
                pending.clear()
                training.wait()
                seconds = seconds_before + perf_counter() - start
                times.append((len(losses), seconds))
                return seconds

            try:
                while training.step < steps:
                    step = training.run()
                    pending.append(step.loss)
                    flops += step.flops
                    saves = step.number % checkpoint_every == 0 and folder is not None
                    says = perf_counter() > last + PROGRESS_SECONDS or step.number == steps
                    if saves or says or len(pending) >= max(1, steps // POINTS):
                        seconds = collect()
                    if saves and folder is not None:
                        training.save(folder, losses, seconds)
                    if says:
                        last = perf_counter()
                        taken = seconds - seconds_before
                        rate = (step.number - first) * self.settings.step_tokens / taken
                        mfu = flops / taken / self._peak()
                        self.session.say(
                            f"{self.who}: step {step.number} of {steps}, loss {losses[-1]:.4f}, "
                            f"{unit('real_tokens').show(rate)}, MFU {mfu:.1%}, "
                            f"{seconds:.0f} s"
                        )
                        self._add_curve(row, losses, times, steps)
                        self.session.save()
            # After an interrupt too.
            finally:
                if pending:
                    collect()
                self._add_curve(row, losses, times, steps)
        # A failure, such as a lack of memory, is a result; the other contenders still run.
        except Exception as error:
            row.add("loss_value", Failure.of(error))
        # Frees the memory of the device for the next contender.
        finally:
            training = step = None
        self.session.save()

    def _add_curve(
        self, row: Row, losses: list[float], times: list[tuple[int, float]], steps: int
    ) -> None:
        if not losses:
            return
        last = max(1, int(FINAL_SHARE * steps))
        row.values |= {
            "trained_count": len(losses),
            "loss_value": float(np.mean(losses[-last:])),
            "train_s": times[-1][1],
        }
        edges = np.unique(np.linspace(0, len(losses), POINTS + 1).astype(int))
        steps_timed, seconds_timed = np.asarray([(0, 0.0), *times]).T
        seconds = np.interp(edges[1:], steps_timed, seconds_timed)
        label = f"{self.who}, seed {row.case['seed']}"
        self.session.result.extra["curves"][label] = [
            [int(b) * self.settings.step_tokens, float(s), float(np.mean(losses[a:b]))]
            for a, b, s in zip(edges, edges[1:], seconds, strict=False)
        ]


def _line(row: Row) -> str:
    shown = [f"{name.rpartition('_')[0]} {unit(name).show(row.values[name])}" for name in SHOWN
             if name in row.values]  # fmt: skip
    return f"{row.who}: {', '.join(shown) if row.status == OK else f'{row.status}: {row.why}'}"


def _ratios(rows: Sequence[Row]) -> Table | None:
    """Return tokens/s and memory relative to length-sorted padding and to varlen_attn."""
    timed = [row for row in rows if "real_tokens" in row.values]
    peers = []
    for name in (REFERENCE, "varlen_attn"):
        named = [row for row in timed if row.who.split(",")[0] == name]
        if named:
            peers.append(max(named, key=lambda row: row.values["real_tokens"]))
    if not peers:
        return None
    header = [
        "contender",
        *(f"{what} / {peer.who}" for peer in peers for what in ("tokens/s", "memory")),
    ]
    lines = []
    for row in timed:
        line = [row.who]
        for peer in peers:
            line.append(f"{row.values['real_tokens'] / peer.values['real_tokens']:.2f}")
            both = "peak_bytes" in row.values and "peak_bytes" in peer.values
            line.append(
                f"{row.values['peak_bytes'] / peer.values['peak_bytes']:.2f}" if both else ""
            )
        lines.append(line)
    return Table("relative to peers", header, lines, [])


def tables(result: Result) -> list[Table]:
    """Return the timed steps, their ratios, the final losses, and the parts of a step."""
    timed, trained = (
        [row for row in result.rows if row.case["part"] == part] for part in ("timed", "curve")
    )
    shown = results.tables(timed, SHOWN)
    ratios = _ratios(timed)
    if ratios is not None:
        shown.append(ratios)
    shown += results.tables(trained)
    profiles = result.extra.get("profiles", {})
    if profiles:
        parts = list(dict.fromkeys(part for times in profiles.values() for part in times))
        lines = [
            [name, *(unit("x_s").show(times.get(part, 0.0)) for part in parts)]
            for name, times in profiles.items()
        ]
        shown.append(Table("parts of a step, by the profiler", ["", *parts], lines, []))
    return shown


def pictures(result: Result) -> plots.Pictures:
    """Return pictures of tokens/s by contender, and of the loss over tokens and over time."""
    timed = {
        row.who: row.values["real_tokens"]
        for row in result.rows
        if row.case["part"] == "timed" and "real_tokens" in row.values
    }
    curves = result.extra.get("curves", {})

    def rates(figure: Any) -> None:
        plots.bars(
            figure.add_subplot(), {"": timed}, "real_tokens", "Real tokens/s: more is better"
        )

    def losses(figure: Any, x: int, xlabel: str) -> None:
        axes = figure.add_subplot()
        colors: dict[str, str] = {}
        for name, points in curves.items():
            # The seeds of a contender share a color and an entry of the legend.
            who = name.partition(", seed ")[0]
            label = None if who in colors else who
            color = colors.setdefault(who, f"C{len(colors)}")
            xs, ys = ([p[i] for p in points] for i in (x, 2))
            axes.plot(xs, ys, label=label, color=color, linewidth=1.0, alpha=0.7)
        axes.set(title="Loss of the next token", xlabel=xlabel, ylabel="nats per token")
        axes.set_yscale("log")
        axes.legend()

    drawn: plots.Pictures = {}
    if timed:
        drawn["train-rate"] = rates
    if curves:
        drawn["train-loss-tokens"] = partial(losses, x=0, xlabel="tokens")
        drawn["train-loss-seconds"] = partial(losses, x=1, xlabel="seconds")
    return drawn
