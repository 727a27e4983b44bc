"""Parts that the subcommands share: measurement, results, peers, and the example algorithms."""

import contextlib
import doctest
import json
import math
import re
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import typer

from scree_bench import gpt, lengths, llama, measure, plots, results
from scree_bench.algorithms import ALGORITHMS, BLOCK, WINDOW, Shape
from scree_bench.commands.attention import SHAPES, workloads
from scree_bench.commands.model import classify, step_flops
from scree_bench.formulas import layer_norm, rms_norm, softmax
from scree_bench.libraries import load
from scree_bench.measure import FAILED, OUT_OF_MEMORY, Failure, interleaved, spread
from scree_bench.operations import step
from scree_bench.results import Result, Row
from scree_bench.session import INTERRUPTED, Session
from scree_bench.work import BACKWARD, Work, reference, relative_error


# --- measuring ---
def test_interleaved_alternates_the_contenders():
    calls = []
    outcomes = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 0.0)
    assert calls[:2] == ["a", "b"]  # warm-up; in the rounds behind it a sample is many calls of one
    turns = [x for i, x in enumerate(calls) if i == 0 or calls[i - 1] != x]
    assert turns == ["a", "b"] * 3
    assert all(len(times.seconds) == 2 and not times.host for times in outcomes.values())


def test_slow_calls_take_few_samples():
    pause = {"slow": lambda: time.sleep(0.02)}
    assert len(interleaved(pause, 1e-3)["slow"].seconds) == 2  # ten times over the budget
    assert len(interleaved(pause, 0.02)["slow"].seconds) == measure.MIN_SAMPLES


def test_doctests_of_measure_pass():
    assert doctest.testmod(measure).attempted and not doctest.testmod(measure).failed


def test_one_failure_does_not_stop_the_others():
    count = iter(range(100))

    def late():
        if next(count) == 3:
            raise MemoryError

    outcomes = interleaved({"late": late, "fine": lambda: math.exp(1)}, 0.01)
    assert outcomes["late"].status == OUT_OF_MEMORY
    assert len(outcomes["fine"].seconds) >= measure.MIN_SAMPLES


def test_a_hanging_case_does_not_stop_the_others(tmp_path):
    def hang():
        time.sleep(60)

    with Session("memory", options(tmp_path, patience=0.05, seconds=0.01)) as session:
        builds = {
            "hangs": lambda: hang,
            "compiles for ever": hang,
            "fine": lambda: lambda: math.exp(1),
        }
        rows = session.time({"n": 1}, "call_s", builds)
    assert rows["fine"].status == "ok"
    for who in ("hangs", "compiles for ever"):
        assert (rows[who].status, rows[who].why) == (FAILED, "call_s: took more than 0.05 s")


def test_interleaved_waits_for_each_result():
    waited = []
    interleaved({"a": lambda: "result"}, 0.0, wait=waited.append, min_samples=1)
    assert waited and set(waited) == {"result"}


class Device:
    """An asynchronous device with the API of PyTorch.

    The clocks of host and device only advance by the simulated calls.
    """

    def __init__(self):
        self.host = self.done = 0.0  # what the host's clock says, and when the device has done all
        self.naps = []

    def launch(self, host, device):
        self.host += host
        self.done = max(self.done, self.host) + device

    def sleep(self, cycles):
        self.naps.append(cycles / 1e9)
        self.launch(1e-5, cycles / 1e9)

    def synchronize(self):
        self.host = max(self.host, self.done)

    def event(self, enable_timing):
        event = SimpleNamespace()
        event.record = lambda: setattr(event, "at", max(self.host, self.done))
        event.query = lambda: event.at <= self.host
        event.elapsed_time = lambda other: (other.at - event.at) * 1e3
        return event


@pytest.fixture
def device(monkeypatch):
    import torch

    fake = Device()
    cache = SimpleNamespace(zero_=lambda: fake.launch(1e-5, 1e-4))
    monkeypatch.setattr(torch.version, "cuda", None)  # a driver that is not there
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", fake.sleep)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: cache)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: fake.host))
    return fake


def test_before_launch_samples_end_at_the_first_launch(monkeypatch):
    now, launch_times, waits = [0.0], [], []

    def call():
        for seconds in (7e-6, 3e-6):  # two launches
            now[0] += seconds
            launch_times.append(now[0])
        now[0] += 5e-6
        return "result"

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    samples = measure.before_launch_samples(
        call, launch_times, 1e-3, seconds=1e-3, wait=waits.append
    )
    # Six calls per sample: one that is not timed, and five that fill the queue for 5 ms.
    assert len(samples) == math.ceil(1e-3 / 9e-5) == len(waits)
    assert samples == pytest.approx([7e-6] * len(samples)) and {*waits} == {"result"}


@pytest.mark.needs("torch")
def test_device_time_excludes_host_time(device):
    """Ten kernels of 5 us, with launches of 100 us each on the host.

    The device sleeps longer until no kernel is late.
    """
    calls = []

    def many(name):
        calls.append(name)
        for _ in range(10):
            device.launch(1e-4, 5e-6)

    def waits():
        calls.append("waits")
        device.synchronize()
        device.launch(1e-5, 2e-5)

    thunks = {"a": partial(many, "a"), "b": partial(many, "b"), "waits": waits}
    outcomes = interleaved(
        thunks, 0.0, wait=lambda _: device.synchronize(), device="cuda", min_samples=3
    )
    for who in ("a", "b"):
        assert outcomes[who].seconds == pytest.approx([5e-5] * 2) and outcomes[
            who
        ].host == pytest.approx([1e-3] * 2)
    assert outcomes["waits"].seconds == pytest.approx([3e-5] * 2)
    assert calls[:5] == ["a", "b", "waits", "a", "a"]  # warm-up; the first sample of a came late
    turns = [x for i, x in enumerate(calls) if calls[i - 1] != x]
    assert turns == ["a", "b", "waits"] * 5  # of the device, two samples each, and of the host
    assert device.naps[-1] == pytest.approx(measure.MIN_SLEEP, rel=0.02)  # of the call that waits


@pytest.mark.needs("torch")
def test_a_slow_launch_affects_one_sample(device):
    launches = iter([1e-4, 5e-3])  # the first call warms up

    outcomes = interleaved(
        {"a": lambda: device.launch(next(launches, 1e-4), 5e-6)}, 0.0, device="cuda", min_samples=2
    )
    assert outcomes["a"].seconds == pytest.approx([5e-6] * 2)
    assert device.naps[2:] == pytest.approx(
        [measure.MIN_SLEEP, 1e-2, measure.MIN_SLEEP], rel=0.02
    )  # behind two that tell the clock rate


@pytest.mark.needs("torch")
def test_clock_rate_counts_the_cycles_after_the_call(device, monkeypatch):
    monkeypatch.setattr(measure, "CLOCK_CYCLES", 10**6)  # one millisecond of the stand-in

    def event(enable_timing):
        new_event = device.event(enable_timing)
        new_event.synchronize = device.synchronize
        return new_event

    import torch

    monkeypatch.setattr(torch.cuda, "Event", event)
    # The host is slower than the device: neither its launches nor the call count.
    assert measure.clock_rate(lambda: device.launch(1e-6, 5e-3)) == pytest.approx(1e9, rel=1e-6)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError("x"), OUT_OF_MEMORY),
        (RuntimeError("CUDA out of memory. Tried to allocate"), OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), OUT_OF_MEMORY),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating"), OUT_OF_MEMORY),
        (ValueError("bad"), FAILED),
    ],
)
def test_failure_of_an_exception_has_its_status(error, status):
    assert Failure.of(error).status == status


def test_require_of_too_much_memory_raises():
    measure.require(1000)
    with pytest.raises(MemoryError, match=r"needs 1000000000\.0 GB, .* are free"):
        measure.require(1e18)


def test_spread_is_half_the_interquartile_range():
    assert spread([1.0]) == 0
    assert spread([9.0, 10.0, 11.0]) == pytest.approx(0.05)


def test_peaks_of_numpy_are_exact():
    x = np.ones(100_000)
    assert measure.traced_peak(lambda: (y := x + 1, y * 2)) == pytest.approx(2 * x.nbytes, rel=0.01)


# --- session ---
def options(tmp_path, **more):
    return {"out": tmp_path, "quick": True, **more}


def test_out_of_memory_is_a_result(tmp_path):
    def huge():
        raise MemoryError("no room")

    with Session("memory", options(tmp_path)) as session:
        rows = session.time({"n": 1}, "call_s", {"small": lambda: lambda: None, "huge": huge})
    assert rows["small"].status == "ok" and rows["small"].values["call_s"] > 0
    assert (rows["huge"].status, rows["huge"].why) == (OUT_OF_MEMORY, "call_s: no room")
    saved = results.read(tmp_path / "memory-cpu.json")
    assert [row.status for row in saved.rows] == ["ok", OUT_OF_MEMORY] and saved.complete


def test_an_interrupt_keeps_what_was_measured(tmp_path):
    with pytest.raises(typer.Exit) as stopped, Session("memory", options(tmp_path)) as session:
        session.value({"n": 1}, "scree", "batch_bytes", lambda: 5)
        raise KeyboardInterrupt
    assert stopped.value.exit_code == INTERRUPTED
    saved = results.read(tmp_path / "memory-cpu.json")
    assert not saved.complete and saved.rows[0].values == {"batch_bytes": 5.0}


def test_an_interrupt_keeps_the_measurements_of_a_case(tmp_path):
    calls = iter(range(100))

    def interrupted():
        if next(calls) == 12:
            raise KeyboardInterrupt
        time.sleep(2 * measure.MIN_SAMPLE_SECONDS)

    with pytest.raises(typer.Exit), Session("memory", options(tmp_path, seconds=100)) as session:
        session.time(
            {"n": 1}, "call_s", {"scree": lambda: interrupted, "later": lambda: lambda: math.exp(1)}
        )
    saved = {row.who: row.counts for row in results.read(tmp_path / "memory-cpu.json").rows}
    # The first call warmed up.
    assert saved["scree"]["call_s"] == 11 and saved["later"]["call_s"]


def test_a_request_to_end_keeps_what_was_measured(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(typer.Exit), Session("memory", options(tmp_path)) as session:
        session.value({"n": 1}, "scree", "batch_bytes", lambda: 5)
        signal.raise_signal(signal.SIGTERM)
    assert results.read(tmp_path / "memory-cpu.json").rows[0].values == {"batch_bytes": 5.0}
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_swallowed_by_a_library_ends_the_session(tmp_path):
    with pytest.raises(typer.Exit), Session("memory", options(tmp_path)) as session:
        with contextlib.suppress(KeyboardInterrupt):  # as such a library does
            signal.raise_signal(signal.SIGINT)
        session.value({"n": 1}, "scree", "batch_bytes", lambda: 5)
        pytest.fail("it goes on")
    assert results.read(tmp_path / "memory-cpu.json").rows[0].values == {"batch_bytes": 5.0}


def test_results_are_written_after_each_case(tmp_path):
    with Session("memory", options(tmp_path)) as session:
        session.time({"n": 1}, "call_s", {"scree": lambda: lambda: None})
        saved = results.read(tmp_path / "memory-cpu.json")
        assert saved.rows[0].counts == session.result.rows[0].counts and not saved.complete


def test_pictures_are_not_needed_to_measure(tmp_path, monkeypatch):
    def missing(*_):
        raise ImportError("matplotlib")

    monkeypatch.setattr(plots, "draw", missing)
    with Session("memory", options(tmp_path)) as session:
        session.value({"n": 1}, "scree", "batch_bytes", lambda: 5)
    assert results.read(tmp_path / "memory-cpu.json").complete


def test_other_errors_are_not_swallowed(tmp_path):
    with pytest.raises(RuntimeError, match="broken"), Session("memory", options(tmp_path)):
        raise RuntimeError("broken")


def test_omissions_are_noted_once(tmp_path):
    with Session("memory", options(tmp_path)) as session:
        for _ in range(2):
            session.leave_out("FA3", "not here")
    assert session.result.left_out == [{"what": "FA3", "why": "not here"}]


# --- results ---
def example(*times: float) -> Result:
    row = Row({"n": 1}, "scree")
    row.add("call_s", times)
    return Result(
        "overhead",
        {},
        {"device": "cpu", "tag": "cpu"},
        {"python": "3"},
        "2026-01-01T00:00:00Z",
        [row],
        complete=True,
    )


def test_results_round_trip(tmp_path):
    example(1.0, 2.0, 4.0).write(tmp_path / "a.json")
    assert results.read(tmp_path / "a.json") == example(1.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema",), "scree-bench/0", "result.schema"),
        (("rows", 0, "status"), "fine", r"rows\[0\].status"),
        (("rows", 0, "values"), {"call_s": "1"}, r"rows\[0\].values.call_s"),
        (("rows", 0, "values"), {"call_parsecs": 1.0}, "expected a name that ends in"),
        (("versions",), [], "result.versions"),
        (("surplus",), 1, "expected the names schema|expected the names command"),
    ],
)
def test_invalid_results_raise_and_name_the_field(tmp_path, path, value, message):
    example(1.0).write(tmp_path / "a.json")
    data = at = json.loads((tmp_path / "a.json").read_text())
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    (tmp_path / "a.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        results.read(tmp_path / "a.json")


def test_written_results_hold_medians_and_spreads_but_no_samples(tmp_path):
    result = example(1.0, 2.0, 4.0)
    result.rows[0].values["size_bytes"] = 123456789.0
    result.write(tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text)["rows"] == [
        {
            "case": {"n": 1},
            "who": "scree",
            "status": "ok",
            "why": "",
            "values": {"call_s": 2, "size_bytes": 123457000},
            "spreads": {"call_s": 0.38},
            "counts": {"call_s": 3},
        }
    ]
    assert '"size_bytes":123457000}' in text  # six digits, without spaces


def test_results_of_the_first_schema_are_reduced(tmp_path):
    example(1.0, 2.0, 4.0).write(tmp_path / "a.json")
    data = json.loads((tmp_path / "a.json").read_text())
    (row,) = data["rows"]
    del row["spreads"], row["counts"]
    row["samples"] = {"call_s": [1.0, 2.0, 4.0]}
    (tmp_path / "old.json").write_text(json.dumps({**data, "schema": "scree-bench/1"}))
    assert results.read(tmp_path / "old.json") == results.read(tmp_path / "a.json")


def test_committed_results_are_valid_and_small():
    paths = sorted((Path(__file__).parents[2] / "docs" / "results").glob("*-*.json"))
    assert paths
    for path in paths:
        result = results.read(path)
        assert result.complete or result.left_out, path  # an interrupted run says what it lacks
        assert json.loads(path.read_text())["schema"] == results.SCHEMA, path
    assert sum(path.stat().st_size for path in paths) < 2.5e6


def test_moves_within_noise_are_not_reported():
    noisy = example(1.0, 1.2, 0.8, 1.1, 0.9)
    assert not results.compare(noisy, example(1.1, 1.2, 0.9))
    (move,) = results.compare(noisy, example(3.0, 3.1, 2.9))
    assert (move.name, move.before, move.after, move.better) == ("call_s", 1.0, 3.0, False)
    (move,) = results.compare(example(1.0, 1.0), example(0.9, 0.9))
    assert move.better is True


def test_tables_show_medians_spreads_and_ratios():
    result = example(1e-3, 1e-3, 1e-3)
    other = Row({"n": 1}, "padded")
    other.add("call_s", [2e-3, 2.2e-3, 1.8e-3])
    result.rows += [other, Row({"n": 1}, "huge", OUT_OF_MEMORY, "call_s: no room")]
    (table,) = results.tables(result.rows)
    assert table.caption == "n 1" and table.header == ["", "call"]
    assert table.lines == [
        ["scree", "1 ms ±0%"],
        ["padded", "2 ms ±5% (2.00x)"],
        ["huge", OUT_OF_MEMORY],
    ]
    assert table.notes == ["huge: out of memory: call_s: no room"]


def test_numbers_are_shown_with_three_digits():
    show = {name: kind.show for name, kind in results.UNITS.items()}
    assert [show["s"](x) for x in (2.5, 0.0123, 4.5e-6, 0.9999)] == [
        "2.5 s",
        "12.3 ms",
        "4.5 us",
        "1,000 ms",
    ]
    assert (
        show["bytes"](1.5e9) == "1.5 GB"
        and show["flops"](7.36e14) == "736 TFLOP/s"
        and show["saved"](0.712) == "71.2%"
    )


def test_tables_mark_losses_to_peers_but_not_to_limits():
    def row(contender: str, seconds: float) -> Row:
        return Row({"n": 1}, contender, values={"call_s": seconds})

    rows = [row("scree", 1.0), row("FA4", 0.8), row("limit", 0.7), row("scree, compiled", 0.9)]
    (table,) = results.tables(rows)
    assert [line[1] for line in table.lines] == [
        "1 s", "800 ms **(0.80x)**", "700 ms (0.70x)", "900 ms (0.90x)",
    ]  # fmt: skip


def test_table_cells_do_not_become_html():
    table = results.Table("", ["kernel"], [["void f<4, int>(a | b)"]], ["f<int>: failed"])
    assert "| void f&lt;4, int>(a \\| b) |" in table.markdown()
    assert "- f&lt;int>: failed" in table.markdown()


def paint(figure):
    group = {"scree": 1.0, "padded": 2.071, "limit": 0.5}
    plots.bars(figure.add_subplot(), {"a < b": group}, "call_s", "Less is better")


def test_picture_serves_both_color_schemes(tmp_path):
    path = plots.save("x", paint, tmp_path)
    text = path.read_text()
    assert path.name == "x.svg" and "prefers-color-scheme:dark" in text
    assert plots.COLORS["chart-scree"][0] in text and plots.COLORS["chart-scree"][1] in text
    # The same again, byte for byte.
    assert plots.save("x", paint, tmp_path).read_text() == text


def test_picture_has_variables_as_colors_and_rounded_coordinates():
    caption, svg = plots.render(paint)
    assert caption == "Less is better" and caption not in re.sub(r"<svg[^>]*>", "", svg)
    assert "padded" in svg and "2.07 s" in svg  # text stays text, and is not rounded
    body = re.sub(r">[^<]*<", "><", svg)
    assert not re.search(r"\d\.\d\d", body) and "#0000" not in body
    for name in ("chart-text", "chart-scree", "chart-5", "chart-limit"):
        assert f"var(--{name})" in svg
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert len(svg) < 8000


def test_limits_are_hatched_outlines_and_peers_have_other_colors_than_scree():
    styles = plots.contender_styles(["padded", "limit", "scree", "scree, compiled"])
    assert styles["scree"]["color"] == styles["scree, compiled"]["color"] == plots.SCREE
    assert styles["scree"]["alpha"] > styles["scree, compiled"]["alpha"]
    assert styles["padded"]["color"] in plots.PEERS
    # A peer keeps its color in pictures with other peers.
    for others in (["FA4"], ["FA4", "FA2 (aten)", "new"], ["new", "FA4"]):
        assert plots.contender_styles(others)["FA4"]["color"] == plots.PEERS[0]
    assert styles["limit"]["facecolor"] == "none" and styles["limit"]["hatch"]


# --- lengths, work, peers ---
def test_lengths_from_files(tmp_path):
    path = tmp_path / "lengths"
    for text in ("3 1,2\n4", "[3, 1, 2, 4]"):
        path.write_text(text)
        assert lengths.read(path).tolist() == [3, 1, 2, 4]
    for text in ("", "1.5", "[[1]]", "-1"):
        path.write_text(text)
        with pytest.raises(typer.BadParameter, match="--lengths: expected"):
            lengths.read(path)


def test_operations_of_attention():
    assert Work((3, 1), 2, 2, 4).flops == 4 * 2 * 4 * (3 * 4 / 2 + 1)
    assert Work((3, 1), 2, 2, 4, causal=False).flops == 4 * 2 * 4 * (9 + 1)
    assert Work(lengths.SEED, 16, 16, 64).flops == pytest.approx(26.5e9, rel=0.01)
    assert BACKWARD == 5 / 2


def test_workloads_are_selected_by_name():
    works = dict(workloads("d64 h8 n1024,small", "cuda", seed=0, quick=False))
    assert list(works) == ["d64 h8 n1024", "small"]
    assert (
        works["d64 h8 n1024"].dim,
        works["d64 h8 n1024"].heads,
        len(works["d64 h8 n1024"].lengths),
    ) == (64, 8, 16)
    assert (
        dict(workloads("shapes", "cuda", seed=0, quick=False)).keys() == SHAPES.keys()
        and len(SHAPES) == 27
    )
    with pytest.raises(typer.BadParameter, match="--work: expected some of"):
        list(workloads("d64", "cuda", seed=0, quick=False))


def test_formulas():
    x = np.asarray([[1.0, 3.0], [0.0, -1e300]])
    assert np.allclose(softmax(np, x), [[1 / (1 + math.exp(2)), 1 / (1 + math.exp(-2))], [1, 0]])
    assert np.allclose(rms_norm(np, x[:1]), [[1 / math.sqrt(5), 3 / math.sqrt(5)]])
    assert np.allclose(layer_norm(np, x[:1]), [[-1, 1]])


@pytest.mark.parametrize("causal", [True, False])
def test_reference_gradients_agree_with_central_differences(causal):
    """Compare the gradients of the float64 reference with its central differences.

    The case has grouped heads and an empty row.
    """
    lib, work = load("numpy"), Work((3, 0, 5), 4, 2, 3, "float64", causal)
    _, *gradients = reference(lib, work)
    dout, step = work.arrays[3].astype(np.float64), 1e-6
    for number, gradient in enumerate(gradients):
        for at in [(0, 0, 0), (7, 1, 2), (4, 1, 1)]:
            traffic = []
            for sign in (1, -1):
                other = Work(work.lengths, 4, 2, 3, "float64", causal)
                arrays = [x.astype(np.float64) for x in work.arrays]
                arrays[number][at] += sign * step
                object.__setattr__(other, "arrays", tuple(arrays))
                traffic.append((reference(lib, other, gradients=False)[0] * dout).sum())
            assert (traffic[0] - traffic[1]) / (2 * step) == pytest.approx(
                gradient[at], rel=1e-6, abs=1e-8
            )


@pytest.mark.needs("torch")
def test_the_reference_is_the_same_on_every_library():
    work = Work((3, 0, 5), 4, 2, 3, "float32")
    for a, b in zip(reference(load("numpy"), work), reference(load("torch"), work), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_distance_is_relative():
    assert relative_error(np.asarray([3.0, 4.5]), np.asarray([3.0, 4.0])) == pytest.approx(0.1)


@pytest.mark.needs("torch")
def test_cotangents_are_random_and_equal_for_all_contenders():
    lib = load("torch")
    x = lib.make(np.zeros((1000, 4)), "float16")

    def pulled(function):
        return [
            gradient.double().numpy()
            for gradient in step(lib, lambda: (function, (x, x)), "both")()
        ]

    (a, b), (c, d) = pulled(lambda x, y: (x + 0, y + 0)), pulled(lambda x, y: (x * 1, y * 1))
    for first, again in ((a, c), (b, d)):
        assert (
            (first == again).all()
            and first.std() == pytest.approx(1, rel=0.1)
            and abs(first.mean()) < 0.1
        )
    assert abs((a * b).mean()) < 0.1  # two results get numbers of their own
    (e, f) = pulled(lambda x, y: (x + y).float().sum())
    assert (e == 1).all() and (f == 1).all()  # a loss


# --- algorithms ---
def attention(q, k, v, window=math.inf, real=None):
    """One plain loop over heads, float64."""
    out = np.zeros_like(q)
    groups = q.shape[1] // k.shape[1]
    for n, h, i in np.ndindex(q.shape[:3]):
        keys = [j for j in range(i + 1) if i - j < window and (real is None or j < real)]
        scores = np.asarray([q[n, h, i] @ k[n, h // groups, j] for j in keys]) / math.sqrt(
            q.shape[3]
        )
        weights = np.exp(scores - scores.max())
        out[n, h, i] = weights @ v[n, h // groups, keys] / weights.sum()
    return out


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_compute_attention(name, monkeypatch):
    from scree_bench import algorithms

    monkeypatch.setattr(algorithms, "BLOCK", 8)
    monkeypatch.setattr(algorithms, "WINDOW", 11)
    algorithm, length = ALGORITHMS[name], 37
    rng = np.random.default_rng(0)
    kv = algorithm.kv_heads(4)
    q, k, v = (rng.standard_normal((2, heads, length, 6)) for heads in (4, kv, kv))
    right = attention(
        q,
        k,
        v,
        11 if name == "sliding window" else math.inf,
        length - length // 4 if "masked" in name else None,
    )
    np.testing.assert_allclose(algorithm.run(q, k, v), right, rtol=1e-12, atol=1e-12)


def test_algorithms_visit_the_expected_tiles():
    q = np.ones((1, 1, 8 * BLOCK, 4))
    visits = {name: [] for name in ("flash v1", "flash v2", "sliding window")}
    for name, seen in visits.items():
        ALGORITHMS[name].run(q, q, q, lambda i, j, top, total, seen=seen: seen.append((i, j)))
    below = [(i, j) for i in range(8) for j in range(i + 1)]
    assert visits["flash v2"] == below
    assert visits["flash v1"] == sorted(below, key=lambda block: block[1])
    assert visits["sliding window"] == [(i, j) for i, j in below if i - j <= WINDOW // BLOCK]


def test_estimates_scale_as_the_algorithms_do():
    short, long = Shape(1, 12, 1024, 64), Shape(1, 12, 4096, 64)
    growth = {
        name: a.estimate_memory(long) / a.estimate_memory(short) for name, a in ALGORITHMS.items()
    }
    assert growth["naive"] == pytest.approx(16, rel=0.1)
    assert all(
        growth[name] < 4.01
        for name in ("flash v1", "flash v2", "sliding window", "grouped-query", "multi-query")
    )
    assert (
        ALGORITHMS["multi-query"].kv_heads(12) == 1
        and ALGORITHMS["grouped-query"].kv_heads(12) == 3
    )


# --- model ---
def test_sizes_of_gpt2():
    assert gpt.SIZES["small"].parameters + 1024 * 768 == 124_439_808
    assert gpt.SIZES["xl"].parameters + 1024 * 1600 == 1_557_611_200


def test_operations_of_a_training_step():
    size, tokens, pairs = gpt.SIZES["tiny"], 5, 3 * 4 / 2 + 2 * 3 / 2
    attention = (
        2 * 2 * (2 + 5) * 64 * pairs
    )  # layers, operations of a product, products, width, and who sees whom
    assert step_flops(size, [np.zeros(3), np.zeros(2)]) == 6 * size.parameters * tokens + attention


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matmul"),
        ("aten::mm", "matmul"),
        ("sm90_xmma_gemm_bf16", "matmul"),
        ("aten::copy_", "copies"),
        ("aten::gelu", "elementwise"),
        ("multi_tensor_apply_kernel<FusedAdamMathFunctor>", "elementwise"),
        ("aten::native_layer_norm", "other"),
        ("attention_dkdv_kernel", "attention"),
        ("fmha_cutlassF_f32", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("Memcpy DtoD", "copies"),
    ],
)
def test_classify_kernels_by_name(name, kind):
    assert classify(name) == kind


# --- block ---
@pytest.mark.needs("torch")
def test_block_compiles_as_one_graph():
    import torch

    from scree_bench.commands import block

    case = block.Case(load("torch"), block.SIZES["quick"], 3, "float32", 0)
    function, x = case.ours()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, *case.weights), function(x, *case.weights))


def test_kernels_are_assigned_to_the_following_mark_or_the_last_one():
    from scree_bench import trace

    lengths = [
        1,
        "a",
        2,
        3,
        "b",
        4,
        "b",
        5,
        "a",
        6,
        7,
    ]  # numbers are kernels of so many seconds, 1 second apart
    kernels, at = [], 0.0
    for x in lengths:
        seconds = 0.5 if isinstance(x, str) else float(x)
        kernels.append(trace.Kernel(at, at + seconds, isinstance(x, str)))
        at += seconds + 1
    assert trace.seconds_by_mark(kernels, ["a", "b", "b", "a"]) == {
        "a": 1 + 6 + 7,
        "b": 2 + 3 + 4 + 5,
    }
    assert trace.seconds_by_mark(kernels[:6], ["a", "b"]) == {"a": 1, "b": 2 + 3 + 4}
    assert trace.idle_seconds(kernels) == len(kernels) - 1


@pytest.mark.needs("torch")
def test_block_limits_are_the_sums_of_its_operations():
    from scree_bench.commands import block

    s = block.SIZES["quick"]
    case = block.Case(load("torch"), s, 3, "float32", 0)
    parts, t = block.terms(case), case.work.total
    weights = sum(w.numel() for w in case.weights if w.ndim == 2)
    products = [term.flops for name, term in parts.items() if name.startswith("product")]
    assert sum(forward for forward, _ in products) == 2 * t * weights
    assert all(backward == 2 * forward for forward, backward in products)
    assert parts["attention"].flops == (case.work.flops, 2.5 * case.work.flops)
    assert parts["gate"].traffic == (3 * 4 * t * s.hidden, 5 * 4 * t * s.hidden)


def test_forms_of_the_llama_like_model_have_equal_losses_and_gradients():
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 512, n) for n in (5, 1, 30)]
    size, results = llama.SIZES["cpu"], []
    for name in ("scree", "padded"):
        weights = llama.parameters(size, 2, "cpu", 0)
        loss = llama.FORMS[name](size, 2, rows, "cpu")(weights)
        loss.backward()
        results.append([loss.detach(), *(weight.grad for weight in weights.values())])
    for x, y in zip(*results, strict=True):
        assert abs(x - y).max() < 1e-5
