"""The comparison of attention with its peers on random shapes: drawing, checks, and resuming."""

import ctypes
import json
import multiprocessing
import os
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from scree_bench import attentions, comparison, results, samples, shapes
from scree_bench.cli import app
from scree_bench.comparison import State, compare, supervise
from scree_bench.libraries import load
from scree_bench.peers import Peer
from scree_bench.results import OK, Result, Row
from scree_bench.samples import Sample
from scree_bench.session import Session
from scree_bench.shape_ratios import shape_ratios, statistics, tables
from scree_bench.shapes import Shape
from scree_bench.work import BACKWARD, Work, inputs, reference

#: Rows with windows, more or fewer keys than queries, and grouped heads.
WORKS = {
    "causal": Work((5, 1, 9), 4, 2, 8, "float32"),
    "full": Work((5, 1, 9), 2, 2, 8, "float32", False),
    "window": Work((5, 1, 9), 2, 1, 8, "float32", window=(3, 0)),
    "two-sided window": Work((5, 1, 9), 2, 1, 8, "float32", False, window=(3, 2)),
    "more keys": Work((5, 1, 9), 4, 1, 8, "float32", key_lengths=(7, 4, 12)),
    "window, more keys": Work((5, 4), 2, 1, 8, "float32", window=(2, 0), key_lengths=(7, 4)),
    "fewer keys": Work((5, 2), 2, 1, 8, "float32", False, key_lengths=(3, 1)),
    "queries without keys": Work((5, 2), 2, 1, 8, "float32", key_lengths=(3, 2)),
}


def pairs(work):
    """Whether each query of each row sees each key, by FlashAttention's definition."""
    for queries, keys in zip(work.lengths, work.keys, strict=True):
        mask = np.zeros((queries, keys), bool)
        for i in range(queries):
            own = i + keys - queries
            for j in range(keys):
                left, right = work.window or (10**9, 10**9)
                mask[i, j] = own - left <= j <= own + (0 if work.causal else right)
        yield mask


def loop(work):
    """The result and its gradients in float64, by a loop over rows, heads and queries."""
    q, k, v, dout = (x.astype(np.float64) for x in work.arrays)
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    for row, mask in enumerate(pairs(work)):
        first, first_key = work.offsets[row], work.key_offsets[row]
        for i in range(work.lengths[row]):
            seen = np.flatnonzero(mask[i]) + first_key
            for head in range(work.heads) if len(seen) else ():
                kv, scale, at = head * work.kv_heads // work.heads, work.dim**-0.5, first + i
                weights = np.exp(k[seen, kv] @ q[at, head] * scale)
                weights /= weights.sum()
                out[at, head] = weights @ v[seen, kv]
                slopes = v[seen, kv] @ dout[at, head]
                slopes = weights * (slopes - weights @ slopes) * scale
                dq[at, head] = slopes @ k[seen, kv]
                dk[seen, kv] += slopes[:, None] * q[at, head]
                dv[seen, kv] += weights[:, None] * dout[at, head]
    return out, dq, dk, dv


# --- drawing ---
def test_draw_of_many_seeds_stays_within_the_limits():
    drawn = [shapes.draw(seed, i, shapes.CUDA) for seed in (1, 2) for i in range(60)]
    for shape in drawn:
        work = shape.work
        assert 1 <= len(work.lengths) <= 20_000 and min(work.lengths) >= 1
        assert max(work.total, sum(work.keys)) <= 500_000 and work.total >= 900
        assert work.heads <= 64 and work.heads // work.kv_heads <= 16
        assert work.heads % work.kv_heads == 0
        assert 32 <= work.dim <= 256 and work.dim % 8 == 0
        assert work.flops * (1 + BACKWARD) <= 200e12 and shapes.bytes_needed(work) <= 20e9
        assert work.dtype in ("float16", "bfloat16")
    for values in (
        {shape.lengths for shape in drawn} ^ set(shapes.DISTRIBUTIONS),
        {True, False} ^ {shape.work.causal for shape in drawn},
        {True, False} ^ {shape.work.window is None for shape in drawn},
        {True, False} ^ {shape.work.key_lengths is None for shape in drawn},
        {True, False} ^ {shape.work.heads == shape.work.kv_heads for shape in drawn},
    ):
        assert not values
    assert len({shape.work.dim for shape in drawn}) > 12


def test_draw_depends_on_seed_and_index_only():
    assert shapes.draw(1, 5, shapes.CPU) == shapes.draw(1, 5, shapes.CPU)
    assert shapes.draw(1, 5, shapes.CPU).work != shapes.draw(1, 6, shapes.CPU).work
    assert shapes.draw(1, 5, shapes.CPU).work != shapes.draw(2, 5, shapes.CPU).work


def test_draw_with_limits_that_no_shape_meets_raises():
    with pytest.raises(ValueError, match="limits: expected limits that a shape can meet"):
        shapes.draw(0, 0, shapes.CUDA._replace(flops=1.0))


def test_one_long_row_has_most_of_the_tokens():
    lengths = shapes.DISTRIBUTIONS["one long"](500, 100_000, np.random.default_rng(3))
    assert len(lengths) == 500 and lengths.sum() == 100_000
    assert lengths.max() > 0.3 * 100_000 and np.median(lengths) < 400


def test_read_expands_lengths_and_fills_in_the_defaults(tmp_path):
    path = tmp_path / "shapes.json"
    entry = {"lengths": [[3, 2], 5], "heads": 4, "dim": 8, "window": [2, 0], "name": "mine"}
    path.write_text(json.dumps([entry, {"lengths": [1], "heads": 1, "dim": 8}]))
    first, second = shapes.read(path)
    assert first.name == "mine" and second.name == "1"
    assert first.work == Work((3, 3, 5), 4, 4, 8, "bfloat16", True, 0, (2, 0))
    assert first.case["window"] == "2, 0" and first.case["rows"] == 3


@pytest.mark.parametrize(
    "text", ["{", '[{"heads": 1, "dim": 8}]', '[{"lengths": [1], "heads": 3, "kv_heads": 2}]', "7"]
)
def test_read_of_anything_else_names_the_option(text, tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text(text)
    with pytest.raises(typer.BadParameter, match="--shapes: expected a list of objects"):
        shapes.read(path)


# --- the problems ---
@pytest.mark.parametrize("name", WORKS)
def test_pairs_of_a_work_are_counted_one_by_one(name):
    work = WORKS[name]
    assert work.pairs == sum(int(mask.sum()) for mask in pairs(work))
    for row, mask in enumerate(pairs(work)):
        np.testing.assert_array_equal(work.visible_keys(row, np.arange(len(mask))), mask)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("make", [attentions.scree_attention(None), attentions.torch_rows])
@pytest.mark.parametrize("name", [name for name in WORKS if name != "queries without keys"])
def test_attention_of_a_contender_equals_the_loop(make, name):
    lib, work = load("torch"), replace(WORKS[name])
    prepared = attentions.packed(make)(lib, work) if make is attentions.torch_rows else None
    prepared = prepared or make(lib, work)
    steps = lib.steps(prepared.function, prepared.args, prepared.cotangent)
    gradients = steps["both"]()()
    for result, expected in zip((steps["forward"]()(), *gradients), loop(work), strict=True):
        np.testing.assert_allclose(result.detach().numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", ["causal", "window", "two-sided window", "more keys"])
def test_flash_attention_gets_lengths_of_queries_and_keys_and_the_window(name, monkeypatch):
    seen = {}
    stand_in = SimpleNamespace(flash_attn_varlen_func=lambda q, k, v, **options: seen | options)
    monkeypatch.setitem(sys.modules, "stand_in", stand_in)
    lib, work = load("torch"), replace(WORKS[name])
    options = attentions.flash("stand_in")(lib, work)(*inputs(lib, work)[0])
    assert options["cu_seqlens_q"].tolist() == [0, *np.cumsum(work.lengths)]
    assert options["cu_seqlens_k"].tolist() == [0, *np.cumsum(work.keys)]
    assert options["max_seqlen_q"] == 9 and options["max_seqlen_k"] == max(work.keys)
    assert options["causal"] == work.causal and options.get("window_size") == work.window


# --- the check ---
@pytest.mark.parametrize(
    "library", ["numpy", pytest.param("torch", marks=pytest.mark.needs("torch"))]
)
@pytest.mark.parametrize("name", WORKS)
def test_exact_results_of_a_sample_equal_the_loop(library, name):
    lib, work = load(library), replace(WORKS[name])
    sample = Sample(lib, work)
    sampled = replace(work)
    dout = np.where(np.asarray(sample.cotangent) != 0, work.arrays[3], 0)
    object.__setattr__(sampled, "arrays", (*work.arrays[:3], dout))
    out, *gradients = loop(sampled)
    parts = [out[np.asarray(sample.tokens)], gradients[0][np.asarray(sample.tokens)]]
    parts += [x[np.asarray(sample.keys)] for x in gradients[1:]]
    for exact, expected in zip(sample.exact, parts, strict=True):
        np.testing.assert_allclose(np.asarray(exact), expected, rtol=1e-9, atol=1e-12)


def test_exact_results_do_not_depend_on_the_heads_at_a_time(monkeypatch):
    lib, work = load("numpy"), Work((40, 9), 6, 3, 8, "float32", key_lengths=(50, 3))
    whole = Sample(lib, work).exact
    monkeypatch.setattr(samples, "NUMBERS", 1)
    for part, expected in zip(Sample(lib, work).exact, whole, strict=True):
        np.testing.assert_allclose(part, expected, rtol=1e-12)


def test_sample_of_long_rows_compares_some_keys(monkeypatch):
    monkeypatch.setattr(samples, "COMPARED", 64 * 3 * 8)
    lib, work = load("numpy"), Work((40, 9), 6, 3, 8, "float32", key_lengths=(500, 30))
    sample = Sample(lib, work)
    assert 32 + 30 < len(sample.keys) <= 64 + 30
    _, dq, dk, dv = loop(work)
    parts = [dq[sample.tokens], dk[sample.keys], dv[sample.keys]]
    assert len(sample.tokens) == work.total and sample.error(parts) < 1e-12
    parts[2][0] *= 2
    assert sample.error(parts) > 1e-3


def test_sample_of_a_work_without_windows_agrees_with_the_reference():
    lib, work = load("numpy"), Work((300, 2, 41), 4, 2, 16, "float32")
    sample = Sample(lib, work)
    assert sum(map(len, sample.queries.values())) < work.total  # not all of them
    out, *_ = reference(lib, work)
    assert sample.error(sample.parts(out)) < 1e-12


def test_sample_has_the_longest_row_and_the_ends_of_each_row():
    lengths = tuple(np.random.default_rng(0).integers(1, 500, 1000).tolist())
    sample = Sample(load("numpy"), Work(lengths, 1, 1, 8))
    assert len(sample.rows) <= samples.ROWS and int(np.argmax(lengths)) in sample.rows
    for row, positions in sample.queries.items():
        assert {0, lengths[row] - 1} <= set(positions.tolist())
        assert len(positions) <= samples.QUERIES


def test_one_wrong_query_exceeds_the_bound():
    lib, work = load("numpy"), Work((90, 50), 4, 2, 16, "float32")
    sample = Sample(lib, work)
    out, *_ = reference(lib, work, gradients=False)
    forward, gradient = sample.bounds()
    assert sample.error(sample.parts(out)) <= forward < 1e-5 and gradient < 1e-4
    out[90 + 49, 3] *= 1.01
    assert sample.error(sample.parts(out)) > forward
    out[90 + 49, 3] = np.nan
    assert not sample.error(sample.parts(out)) <= forward


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("dtype", "rounding"), [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_eager_errors_are_of_the_size_of_a_rounding(dtype, rounding):
    sample = Sample(load("torch"), Work((200, 40), 2, 1, 32, dtype))
    for error in sample.eager:
        assert rounding / 8 < error < 4 * rounding


# --- measuring ---
def contender(name, change=lambda x: x, error=None):
    """A stand-in of a peer: the loop over rows, whose results `change` may falsify."""

    def make(lib, work):
        attend = attentions.torch_rows(lib, work)

        def run(q, k, v):
            if error is not None:
                raise error
            return change(attend(q, k, v))

        return run

    return Peer(name, "torch", attentions.packed(make))


def options(tmp_path, **more):
    return {"out": tmp_path, "quick": True, "seconds": 0.01, **more}


def measured(tmp_path, peers, monkeypatch, todo=None, run=compare):
    """The result of a comparison with stand-ins of the peers."""
    monkeypatch.setattr("scree_bench.peers.PEERS", peers)
    monkeypatch.setattr(comparison, "CONTENDERS", {"cpu": [peer.name for peer in peers]})
    todo = todo or [Shape(str(i), "given", Work((4 + i, 2), 2, 1, 8)) for i in range(2)]
    with Session("attention", options(tmp_path), part="random seed 1") as session:
        state = State(session, is_resumed=session.resume(), is_replaceable=False)
        run(session, load("torch"), todo, state)
    return session.result


@pytest.mark.needs("torch")
def test_compare_with_peers_that_fail_times_the_others(tmp_path, monkeypatch):
    peers = [
        contender("scree"),
        contender("right"),
        contender("raises", error=MemoryError("no memory")),
        contender("wrong", lambda x: x * 1.01),
        contender("not finite", lambda x: x / 0),
    ]
    result = measured(tmp_path, peers, monkeypatch)
    rows = {(row.case["shape"], row.who): row for row in result.rows}
    for shape in "01":
        for who in ("scree", "right"):
            row = rows[shape, who]
            assert row.status == OK and {"forward_s", "both_s", "both_wall_s"} <= row.values.keys()
        assert rows[shape, "raises"].status == "out of memory"
        assert "wrong: the error is" in rows[shape, "wrong"].why
        for who in ("raises", "wrong", "not finite"):
            assert rows[shape, who].status != OK
            assert not {"forward_s", "both_s"} & rows[shape, who].values.keys()
        assert rows[shape, "eager"].values["gradient_error"] > 0
    assert result.extra["done"] == ["0", "1"]
    assert result.extra["ratios"]["both"]["classes"]["all"]["count"] == 2
    stored = results.read(tmp_path / "attention-random-seed-1-cpu.json")
    assert [row.who for row in stored.rows] == [row.who for row in result.rows]


@pytest.mark.needs("torch")
def test_compare_of_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    peers = [contender("scree"), contender("right")]
    todo = [Shape(str(i), "given", Work((4 + i, 2), 2, 1, 8)) for i in range(3)]
    calls = []

    def interrupted(session, lib, todo, state):
        measure = comparison.measure_shape

        def once(*args):
            calls.append(args[2].name)
            if len(calls) == 2:
                raise KeyboardInterrupt
            measure(*args)

        monkeypatch.setattr(comparison, "measure_shape", once)
        compare(session, lib, todo, state)

    with pytest.raises(typer.Exit):
        measured(tmp_path, peers, monkeypatch, todo, interrupted)
    stored = results.read(tmp_path / "attention-random-seed-1-cpu.json")
    assert stored.extra["done"] == ["0"] and not stored.complete
    result = measured(tmp_path, peers, monkeypatch, todo)
    assert calls == ["0", "1", "1", "2"]
    assert result.extra["done"] == ["0", "1", "2"] and result.complete
    assert [row.who for row in result.rows] == ["eager", "scree", "right"] * 3


@pytest.mark.needs("torch")
def test_compare_leaves_out_a_peer_that_ended_the_process(tmp_path, monkeypatch):
    peers = [contender("scree"), contender("crashes"), contender("right")]
    with Session("attention", options(tmp_path), part="random seed 1") as session:
        session.row({"shape": "0"}, "scree")  # of the shape that was not completed
        session.result.extra |= {"done": [], "running": ["0", "crashes"]}
    result = measured(tmp_path, peers, monkeypatch)
    rows = {(row.case["shape"], row.who): row for row in result.rows}
    assert len(rows) == len(result.rows) == 8
    assert "the process ended" in rows["0", "crashes"].why
    assert rows["0", "right"].status == rows["1", "crashes"].status == OK


@pytest.mark.needs("torch")
def test_compare_with_an_unusable_device_asks_for_a_new_process(tmp_path, monkeypatch):
    lib = load("torch")
    broken = []

    def wait(x):
        if broken:
            raise RuntimeError("illegal memory access")
        return x

    peers = [contender("scree", lambda x: broken.append(1) or x)]
    monkeypatch.setattr("scree_bench.peers.PEERS", peers)
    todo = [Shape("0", "given", Work((4, 2), 2, 1, 8))]
    session = Session("attention", options(tmp_path), part="random seed 1")
    with pytest.raises(typer.Exit) as exit_error, session:
        state = State(session, is_resumed=False, is_replaceable=True)
        compare(session, replace(lib, wait=wait), todo, state, ["scree"])
    assert exit_error.value.exit_code == comparison.RESTART
    stored = results.read(session.path)
    assert stored.extra["excluded"] == [["0", "scree", "illegal memory access"]]
    assert stored.extra["done"] == []


def test_resume_on_another_machine_raises(tmp_path):
    with Session("attention", options(tmp_path), part="random seed 1") as session:
        session.result.versions["numpy"] = "0.1"
    again = Session("attention", options(tmp_path), part="random seed 1")
    with pytest.raises(typer.BadParameter, match=r"same versions .* numpy 0.1 -> .* --fresh"):
        again.resume()


# --- processes ---
def end_twice(path):
    """Exit twice as a peer would end the process, then without error."""
    count = len(path.read_text()) if path.exists() else 0
    path.write_text("x" * (count + 1))
    os._exit([comparison.RESTART, 9, 0][count])


def test_supervise_replaces_a_process_until_it_finishes(tmp_path):
    path = tmp_path / "count"
    assert supervise(end_twice, (path,), lambda: len(path.read_text()) < 3) == 0
    assert path.read_text() == "xxx"


def test_supervise_of_a_process_with_an_error_returns_its_status(tmp_path):
    path = tmp_path / "count"
    path.write_text("x")
    assert supervise(end_twice, (path,), lambda: False) == 9


def hang_without_the_interpreter(folder):
    """Block all threads of Python, as a compiler that never ends."""
    session = Session("attention", options(folder), part="random seed 1")
    state = State(session, is_resumed=False, is_replaceable=True)
    with state.running(Shape("0", "given", Work((1,), 1, 1, 8)), "hangs", 0.2):
        ctypes.PyDLL(None).sleep(60)


def test_running_ends_a_process_that_hangs(tmp_path):
    process = multiprocessing.get_context("spawn").Process(
        target=hang_without_the_interpreter, args=(tmp_path,)
    )
    start = time.monotonic()
    process.start()
    process.join(50)
    assert process.exitcode == 1 and time.monotonic() - start < 50
    stored = results.read(tmp_path / "attention-random-seed-1-cpu.json")
    assert stored.extra["running"] == ["0", "hangs"]


@pytest.mark.needs("torch")
@pytest.mark.parametrize("restart", [("--compile-processes", "1"), ("--no-restart",)])
def test_command_with_random_shapes_goes_on_with_more(restart, tmp_path):
    arguments = ["attention", "--quick", "--device", "cpu", "--seed", "5", "--out", str(tmp_path)]
    for count, new in ((1, ["0"]), (2, ["1"])):
        run = CliRunner().invoke(app, [*arguments, "--random", str(count), *restart])
        assert run.exit_code == 0, run.output
        # The output of another process is not captured.
        if restart == ("--no-restart",):
            lines = [line for line in run.output.splitlines() if "; both" in line]
            assert [line.split(":")[0] for line in lines] == [f"shape {name}" for name in new]
    result = results.read(tmp_path / "attention-random-seed-5-cpu.json")
    assert result.extra["done"] == ["0", "1"] and result.complete
    assert list(tmp_path.glob("*.svg"))


# --- ratios ---
def rows_of(times):
    """Rows of shapes with the times of contenders."""
    for i, by_contender in enumerate(times):
        case = Shape(str(i), "zipf", Work((4 + i, 2), 4, 2, 64)).case
        for who, seconds in by_contender.items():
            yield Row(case, who, values={"forward_s": seconds, "forward_error": 1e-3})
        yield Row(case, "eager", values={"forward_error": 2e-3})


def test_shape_ratios_use_the_fastest_peer():
    rows = list(rows_of([{"scree": 1.0, "FA2": 4.0, "FA4": 2.0}, {"scree": 3.0, "FA2": 2.0}]))
    ratios = shape_ratios(rows, "forward")
    assert [(x.case["shape"], x.ratio, x.peer) for x in ratios] == [
        ("1", 1.5, "FA2"),
        ("0", 0.5, "FA4"),
    ]
    assert not shape_ratios(rows, "both")
    assert not shape_ratios(list(rows_of([{"scree": 1.0}, {"FA2": 1.0}])), "forward")


def test_statistics_of_hundred_ratios():
    ratios = [i / 100 for i in range(1, 102)]
    assert statistics(ratios) == pytest.approx(
        {"count": 101, "median": 0.51, "percentile_95": 0.96, "worst": 1.01}
    )
    assert statistics([]) == {"count": 0}


def test_tables_name_the_worst_shapes_and_the_failures():
    rows = list(rows_of([{"scree": 1.0, "FA2": i / 10} for i in range(1, 13)]))
    rows.append(Row(rows[0].case, "FA4", "failed", "both_s: no kernel"))
    rows.append(Row({**rows[0].case, "shape": "99"}, "scree", "failed", "forward_s: broken"))
    ratios, worst, _, errors = tables(rows)
    assert ratios.lines[0][:6] == ["all", "", "12", "**1.55**", "**7.25**", "**10.00**"]
    assert ratios.lines[0][6:] == ["0", "", "", ""]
    assert ["query heads per kv head", "2 to 4"] in [line[:2] for line in ratios.lines]
    assert ratios.notes[0] == "scree, shapes 99: forward_s: broken"
    assert ratios.notes[1] == "FA4, shapes 0: both_s: no kernel"
    assert [line[0] for line in worst.lines] == [str(i) for i in range(10)]
    assert worst.lines[0][-1] == "**10.00**" and worst.lines[0][4] == "FA2"
    assert errors.lines[0][:4] == ["scree", "12 of 12", "0.50", "0.50"]
    assert Result("attention", {}, {}, {}, "", rows)
