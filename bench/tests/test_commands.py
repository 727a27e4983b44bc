"""Every subcommand with ``--quick``: valid JSON, and correct figures with a known value."""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import typer
from typer.testing import CliRunner

from scree_bench import page_parts, pages, plots, results, shard_pages
from scree_bench.cli import MEASURING, app
from scree_bench.measure import Failure
from scree_bench.results import OK, Result, Row
from scree_bench.session import INTERRUPTED

DOCS = Path(__file__).parents[2] / "docs"
#: Relative error of products and sums of stored numbers, which have six digits.
ROUNDED = 2e-5
TORCH = find_spec("torch") is not None
NEEDS_TORCH = ("norms", "kernels", "block", "model", "train", "collectives", "shards")
EAGER = ",".join(name for name in ("numpy", "torch") if find_spec(name))
LAZY = [name for name, module in (("jax", "jax"), ("mlx", "mlx")) if find_spec(module)]


def needs(command):
    """The marks of a test of a subcommand."""
    return [pytest.mark.needs("torch")] if command in NEEDS_TORCH else []


#: What PyTorch itself cannot do: exactly these rows fail.
KNOWN_FAILURES = {
    (name, "torch.nested") for name in ("sum of rows", "mean of rows", "prod of rows")
}


def invoke(*arguments: str, status: int | None = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert status is None or result.exit_code == status, result.output
    return result.output


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The machine runs other tests at the same time."""
    if TORCH:
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)
    else:
        yield


#: Commands whose peaks depend on what else ran in the process: after `torch.compile`, Python holds
#: the arguments of a call until it returns.
IN_A_PROCESS = ("algorithms",)


def quick(folder: Path, command: str, *options: str) -> Result:
    """The result of a quick run."""
    backend = () if command in NEEDS_TORCH or "--backend" in options else ("--backend", EAGER)
    device = () if command == "ratios" else ("--device", "cpu")
    arguments = [command, "--quick", "--out", str(folder), *device, *backend, *options]
    if command in IN_A_PROCESS:
        subprocess.run([sys.executable, "-m", "scree_bench", *arguments], check=True)
    else:
        # a limit of `ratios` may be passed on a busy machine; that has a test of its own
        invoke(*arguments, status=None if command == "ratios" else 0)
    (path,) = folder.glob(f"{command}-*.json")
    return results.read(path)  # which checks the schema


def saves_what_was_published(result: Result) -> None:
    saved = {row.case["rows"]: row.values for row in result.rows if "least_saved" in row.values}
    for rows, published in ((64, (0.71, 0.63, 0.84)), (32, (0.85, 0.75, 0.94))):
        three = [saved[rows][name] for name in ("mean_saved", "least_saved", "most_saved")]
        assert three == pytest.approx(published, abs=0.01)


def peaks_are_those_of_the_estimates(result: Result) -> None:
    rows = [row for row in result.rows if "peak_bytes" in row.values and row.case["length"] == 512]
    assert len(rows) == 7 * len(EAGER.split(","))
    for row in rows:  # the longest, where Python's own objects count for little
        assert row.values["peak_bytes"] == pytest.approx(row.values["estimate_bytes"], rel=0.15), (
            row.case,
            row.who,
        )


def accumulates_as_known(result: Result) -> None:
    sums: dict[str, list[float]] = {}
    for row in result.rows:
        if "sum_value" in row.values:
            sums.setdefault(row.who, []).append(round(row.values["sum_value"], 4))
    assert sums == {name: [10.0001, 9.9531, 10.0021, 10.0021] for name in EAGER.split(",")}


def sums_half_precision_wide(result: Result) -> None:
    """At 300 a square overflows float16. scree must not, nor exceed a few roundings of error."""
    eps = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-23, "float64": 2**-52}
    rows = [row for row in result.rows if row.who == "scree" and "relative_error" in row.values]
    assert {row.case["size of numbers"] for row in rows} == {1.0, 300.0}
    for row in rows:
        roundings = 1 if row.case["dtype"] in ("float16", "bfloat16") else 16
        assert row.values["relative_error"] < roundings * eps[row.case["dtype"]], row.case


def is_right_whoever_computes_it(result: Result) -> None:
    errors = [
        row.values[name]
        for row in result.rows
        for name in ("forward_error", "gradient_error")
        if name in row.values
    ]
    assert len(errors) >= len(result.rows)
    assert max(errors) < 16 * 2**-23
    work = (
        4
        * 4
        * 64
        * sum(
            n * (n + 1) / 2 for n in (16, 32, 24, 8, 64, 12, 28, 20, 48, 10, 36, 15, 22, 6, 26, 13)
        )
    )
    for row in result.rows:
        assert row.values["forward_flops"] * row.values["forward_s"] == pytest.approx(
            work, rel=ROUNDED
        )


def is_right_within_some_roundings(result: Result) -> None:
    rows = [row for row in result.rows if "relative_error" in row.values]
    assert [row.who for row in rows].count("scree") == {"norms": 3, "kernels": 17}[result.command]
    for row in rows:
        assert row.values["relative_error"] < 16 * 2**-23, (row.case, row.who)


def has_one_loss_ragged_and_padded(result: Result) -> None:
    losses: dict[str, dict[str, float]] = {}
    for row in result.rows:
        if "first_loss_value" in row.values:
            losses.setdefault(row.case["precision"], {})[row.who] = row.values["first_loss_value"]
    assert losses.keys() == {"fp32", "bf16 autocast"}
    for precision, loss in losses.items():
        assert loss["scree"] == pytest.approx(
            math.log(512), rel=0.02
        )  # of random weights: all words alike
        assert loss["scree"] == pytest.approx(
            loss["padded"], rel=2**-20 if precision == "fp32" else 2**-10
        )


def adds_up_to_whole_steps(result: Result) -> None:
    for row in result.rows:
        if "phase" in row.case:
            assert sum(row.values.values()) == pytest.approx(1, rel=ROUNDED)
        else:
            parts = [row.values[f"{phase}_s"] for phase in ("forward", "backward", "optimizer")]
            # Medians of few samples add up only roughly.
            assert sum(parts) == pytest.approx(row.values["step_s"], rel=0.5)
            assert row.values["backward_peak_bytes"] >= row.values["forward_peak_bytes"] > 0


def is_right_in_every_form(result: Result) -> None:
    whole = {row.who: row.values for row in result.rows if row.case["part"] == "the whole block"}
    for who in ("scree", "padded, SDPA"):
        assert max(whole[who]["forward_error"], whole[who]["gradient_error"]) < 16 * 2**-23, who
    for phase in ("forward", "both"):
        limits = [
            row.values[f"{phase}_limit_s"]
            for row in result.rows
            if f"{phase}_limit_s" in row.values
        ]
        assert (
            whole["limit"][f"{phase}_s"]
            == pytest.approx(sum(limits[:-1]), rel=ROUNDED)
            == pytest.approx(limits[-1], rel=ROUNDED)
        )


def counts_what_links_carry(result: Result) -> None:
    share = {
        "all-reduce": 1.0,
        "all-gather": 0.5,
        "reduce-scatter": 0.5,
        "all-to-all": 0.5,
    }  # two processes
    rows = result.rows
    assert {row.who for row in rows} == share.keys()
    for row in rows:
        assert row.values["bus_rate"] * row.values["call_s"] == pytest.approx(
            share[row.who] * row.case["bytes"], rel=ROUNDED
        )


def attends_to_every_page(result: Result) -> None:
    kinds = {"decode", "skew", "mixed", "append", "shared", "random"} | (
        {"fp8"} if TORCH else set()
    )
    assert {row.case["kind"] for row in result.rows} == kinds
    for row in result.rows:
        if row.case["kind"] != "append":
            assert row.values["relative_error"] < 16 * 2**-23, (row.case, row.who)
        if row.case["kind"] == "decode":
            # Keys and values of 2 heads of size 16, in float32.
            assert row.values["call_rate"] * row.values["call_s"] == pytest.approx(
                row.case["tokens"] * 2 * 2 * 16 * 4, rel=ROUNDED
            )


def has_one_first_loss_in_all_forms(result: Result) -> None:
    losses = {row.who: row.values["first_loss_value"] for row in result.rows}
    assert losses["scree"] == pytest.approx(losses["padded"], rel=1e-5)
    assert losses["scree"] == pytest.approx(losses["padded sorted"], rel=1e-5)
    assert losses["windows"] != losses["scree"]  # attention across documents


def has_the_results_of_one_process(result: Result) -> None:
    assert not result.left_out
    errors = {
        name: [row.values[name] for row in result.rows if name in row.values]
        for name in ("relative_error", "loss_error", "resumed_loss_error")
    }
    # Attention: five batches. Models: two batches in four modes; data parallel FSDP2 saves and loads.
    assert [*map(len, errors.values())] == [5, 8, 2]
    assert max(map(max, errors.values())) < 1e-5
    received = {row.case["batch"]: row.values.get("received_bytes") for row in result.rows
                if row.who == "scree" and "batch" in row.case}  # fmt: skip
    # Half of the keys and values of the document, 8 heads of 8 numbers each.
    assert received["one document of 128"] == 64 * 2 * 8 * 8 * 4
    # The first process has both ends of the document, and needs the 15 keys before the second cut.
    assert received["one document of 512, window 16"] == 15 * 2 * 8 * 8 * 4
    assert len([row for row in result.rows if "token_cost_value" in row.values]) == 3


#: Subcommand -> what must hold of its results.
CHECKS = {
    "decode": (attends_to_every_page,),
    "memory": (saves_what_was_published,),
    "algorithms": (peaks_are_those_of_the_estimates,),
    "precision": (accumulates_as_known, sums_half_precision_wide),
    "attention": (is_right_whoever_computes_it,),
    "norms": (is_right_within_some_roundings,),
    "kernels": (is_right_within_some_roundings,),
    "model": (has_one_loss_ragged_and_padded, adds_up_to_whole_steps),
    "train": (has_one_first_loss_in_all_forms,),
    "block": (is_right_in_every_form,),
    "collectives": (counts_what_links_carry,),
    "shards": (has_the_results_of_one_process,),
}


@pytest.mark.parametrize("command", [pytest.param(name, marks=needs(name)) for name in MEASURING])
def test_quick_run(command, tmp_path):
    result = quick(tmp_path, command, *(["--model"] if command == "shards" else []))
    assert result.complete and result.rows and result.command == command and result.config["quick"]
    for row in result.rows:
        for name, count in row.counts.items():
            if name.endswith("_s"):
                assert count >= 2 and row.values[name] > 0 and row.spreads[name] >= 0
        fails = (row.case.get("operation"), row.who) in KNOWN_FAILURES
        assert (row.status != OK) is fails, f"{row.case} {row.who}: {row.status} {row.why}"
    assert list(tmp_path.glob("*-cpu.svg"))
    for holds in CHECKS.get(command, ()):
        holds(result)


def test_memory_with_lengths_from_a_file(tmp_path):
    (tmp_path / "lengths.txt").write_text("1, 2\n3 8")
    invoke(
        "memory",
        "--quick",
        "--lengths",
        str(tmp_path / "lengths.txt"),
        "--num-seqs",
        "2",
        "--feature-dim",
        "4",
        "--backend",
        "numpy",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    )
    (path,) = tmp_path.glob("*.json")
    batch = {
        row.who: row.values["batch_bytes"]
        for row in results.read(path).rows
        if "batch_bytes" in row.values
    }
    # Batches (1, 2) and (3, 8): a token is 16 bytes, and 17 with its mask. Three offsets are 12
    # bytes.
    assert batch["scree"] == (3 * 16 + 12 + 11 * 16 + 12) / 2
    assert batch["padded"] == (4 * 17 + 16 * 17) / 2
    assert batch["padded to powers of two"] == ((1 + 2) * 17 + (4 + 8) * 17) / 2


def test_attention_on_all_combinations(tmp_path):
    sizes = (
        "--num-seqs",
        "3",
        "--mean-len",
        "8,12",
        "--sigma",
        "0,0.5",
        "--heads",
        "1,2",
        "--dim",
        "4,8",
        "--causal",
        "yes,no",
    )
    result = quick(tmp_path, "attention", "--backend", "numpy", "--no-errors", *sizes)
    assert len({repr(row.case) for row in result.rows}) == 32
    assert {
        row.case["tokens"] for row in result.rows if row.case["work"] == "median 12, sigma 0"
    } == {36}


@pytest.mark.needs("torch")
def test_model_with_lengths_from_a_file(tmp_path):
    (tmp_path / "lengths.txt").write_text("3 5 2")
    result = quick(
        tmp_path, "model", "--lengths", str(tmp_path / "lengths.txt"), "--precisions", "fp32"
    )
    assert {(row.case["rows"], row.case["tokens"], row.case["longest"]) for row in result.rows} == {
        (3, 10, 5)
    }


@pytest.mark.needs("torch")
def test_collectives_take_no_more_memory_than_there_is(tmp_path):
    result = quick(tmp_path, "collectives", "--sizes", "1e6")
    ((entry,), rows) = result.left_out, result.rows
    assert (
        entry["what"] == "2 processes, 1,000,000,000,000 bytes"
        and entry["why"].startswith("needs 6000.0 GB")
        and not rows
    )


@pytest.mark.needs("torch")
def test_kernels_of_selected_operations(tmp_path):
    result = quick(tmp_path, "kernels", "--operations", "rope,sum")
    assert {row.case["operation"] for row in result.rows} == {
        "sum of rows",
        "rope",
        "rope, neighbors as pairs",
    }


@pytest.mark.needs("torch")
def test_kernels_of_rows_of_numbers_are_operations_along_rows(tmp_path):
    result = quick(tmp_path, "kernels", "--width", "0", "--operations", "softmax,sum,rope")
    assert {row.case["operation"] for row in result.rows} == {"softmax", "sum of rows"}
    assert {row.case["width"] for row in result.rows} == {1}


def test_omissions_are_listed(tmp_path):
    result = quick(
        tmp_path, "attention", "--backend", "numpy", "--num-seqs", "2", "--mean-len", "8"
    )
    assert {
        "what": "backward on numpy",
        "why": "the library does not differentiate",
    } in result.left_out
    if TORCH:
        left = {entry["what"] for entry in quick(tmp_path, "kernels").left_out}
        assert {"compiled forms", "liger_kernel", "grouped_mm", "transformers"} < left


@pytest.mark.skipif(not LAZY, reason="needs JAX or MLX")
def test_attention_on_libraries_that_compile(tmp_path):
    small = ("--num-seqs", "3", "--mean-len", "12", "--heads", "2", "--dim", "8")
    result = quick(tmp_path, "attention", "--backend", ",".join(LAZY), *small)
    assert {row.case["backend"] for row in result.rows} == set(LAZY)
    for row in result.rows:
        assert row.status == OK, row.why
        assert {"forward_error", "gradient_error"} <= row.values.keys()
        assert max(row.values["forward_error"], row.values["gradient_error"]) < 16 * 2**-23


@pytest.mark.needs("torch")
def test_best_tile_is_the_fastest(tmp_path):
    rows = quick(tmp_path, "attention", "--tiles").rows
    best = [row for row in rows if "best of" in row.case]
    assert len(best) == 3 * len({row.case["length"] for row in rows})
    for row in best:
        name = f"{row.case['best of']}_s"
        case = {k: v for k, v in row.case.items() if k != "best of"}
        assert row.values[name] == min(r.values[name] for r in rows if r.case == case)


@pytest.mark.needs("triton")
def test_tiles_of_the_triton_kernels_can_be_set():
    from scree_bench.commands.attention import TILERS
    from scree_triton.attention import launch_configs, portable_config, tile_configs

    modules = launch_configs, portable_config
    before = [module.portable_tiles for module in modules]
    with TILERS["triton"](32, 64):
        for module in modules:
            tiles = module.portable_tiles((9, 0), 2, 64, dropout=False)
            assert tiles.forward == tile_configs.Tile(32, 64, 4, 2)
        assert not tile_configs.SM90_TILES
    assert [module.portable_tiles for module in modules] == before and tile_configs.SM90_TILES


def test_ratio_above_its_limit_fails_the_run(monkeypatch):
    from scree_bench.commands import ratios

    def cases(limit):
        return lambda lib, quick: [ratios.Case("nothing", lambda: None, lambda: None, limit)]

    for name in ("general_cases", "attention_cases"):
        monkeypatch.setattr(ratios, name, lambda lib, quick: [])
    monkeypatch.setattr(ratios, "sort_case", cases(1e9))
    invoke("ratios", "--quick", "--no-rivals", "--backend", "numpy")
    monkeypatch.setattr(ratios, "sort_case", cases(0))
    assert "over the limit: numpy, nothing" in invoke(
        "ratios", "--quick", "--no-rivals", "--backend", "numpy", status=1
    )


def test_report_and_compare(tmp_path):
    commands = ("memory", "algorithms", "precision")
    for command in commands:
        quick(tmp_path, command, "--backend", "numpy")
    paths = [tmp_path / f"{command}-cpu.json" for command in commands]
    (tmp_path / "other.json").write_text("{}")
    said = invoke(
        "report",
        *map(str, paths),
        str(tmp_path / "other.json"),
        "--out",
        str(tmp_path / "docs" / "bench.md"),
    )
    assert "other.json" in said
    overview = (tmp_path / "docs" / "bench.md").read_text()
    assert "](bench/cpu.md#precision)" in overview
    text = (tmp_path / "docs" / "bench" / "cpu.md").read_text()
    for title in ("## Memory", "## Algorithms", "## Precision"):
        assert title in text
    # The command has the options that differ from their defaults.
    assert "`scree-bench precision --backend numpy --device cpu --quick`" in text
    pictures = re.findall(r"!\[[^]]+\]\((.+?)\)", text)
    assert len(pictures) >= 8
    for picture in pictures:
        drawn = (tmp_path / "docs" / "bench" / picture).read_text()
        assert drawn.startswith("<svg") and "<text" in drawn

    worse = json.loads(paths[0].read_text())
    for row in worse["rows"]:
        row["values"] = {
            k: 3 * v if k == "batch_bytes" and row["who"] == "scree" else v
            for k, v in row["values"].items()
        }
    (tmp_path / "worse.json").write_text(json.dumps(worse))
    invoke("compare", str(paths[0]), str(paths[0]))
    assert "worse: rows 64" in invoke(
        "compare", str(paths[0]), str(tmp_path / "worse.json"), status=1
    )
    assert "better: rows 64" in invoke("compare", str(tmp_path / "worse.json"), str(paths[0]))
    invoke("compare", str(paths[0]), str(paths[1]), status=2)
    said = invoke("compare", str(paths[0]), str(tmp_path / "worse.json"), "--worst", "1", status=1)
    assert re.search(r"batch_bytes: \d+ ratios: min 3.00, median 3.00, max 3.00", said)
    assert len(re.findall(r"^3.00x: rows 64", said, re.MULTILINE)) == 1


def test_ratios_of_two_runs_put_the_worst_first():
    def run(call: float, rate: float) -> Result:
        values = {"call_s": call, "copy_rate": rate, "zero_s": 0.0, "size_count": 3.0}
        rows = [Row({"call": "add"}, who, values=values) for who in ("scree", "bare")]
        return Result("overhead", {}, {}, {}, "", rows)

    slower = results.ratios(run(1.0, 8.0), run(2.0, 2.0))
    assert [(r.who, r.name, r.ratio) for r in slower] == [
        ("scree", "copy_rate", 0.25),
        ("scree", "call_s", 2.0),
    ]
    assert [r.name for r in results.ratios(run(2.0, 2.0), run(1.0, 8.0))] == ["call_s", "copy_rate"]


def sweep() -> Result:
    """Two named, two swept workloads: scree takes half the time of a peer failing on the last."""
    machine = {
        "device": "cuda",
        "gpu": "NVIDIA H100 80GB HBM3",
        "tag": "h100",
        "cpu": "Xeon",
        "cores": 16,
        "system": "Linux x86_64",
        "limits": {"copy_rate": 3e12},
    }
    rows = []
    for i, work in enumerate(("seed", "gqa", "d32 h4 n256", "d64 h8 n1024")):
        for who, factor in (("scree", 1), ("FA2", 2)):
            row = Row({"work": work, "dtype": "float16"}, who)
            row.add("forward_s", [1e-4 * factor] * 3)
            row.add(
                "both_s", Failure("failed", "no") if (i, who) == (3, "FA2") else [3e-4 * factor] * 3
            )
            rows.append(row)
    notes = {"notes": ["Cut off."]}
    return Result(
        "attention",
        {},
        machine,
        {"torch": "2.11"},
        "2026-01-01T00:00:00Z",
        rows,
        extra=notes,
        complete=True,
    )


def test_overview_has_ratios_to_peers_and_bold_losses(tmp_path):
    result = sweep()
    for row in result.rows:
        row.who = row.who.replace("FA2", "FA2 (aten)")
    result.rows[2].values["forward_s"] = 1.2e-4  # scree on gqa, of which the peer takes 1e-4
    result.rows[3].values["forward_s"] = 1e-4
    result.write(tmp_path / "attention-h100.json")
    page = tmp_path / "speed.md"
    invoke("report", str(tmp_path / "attention-h100.json"), "--out", str(page))
    text = page.read_text()
    assert "| machine | workload |  | scree | / FA2 | / FA3 | / FA4 | / efficient |" in text
    assert "| H100 | seed, float16 | forward | 100 us | 0.50 |  |  |  |" in text
    assert "| H100 | gqa, float16 | forward | 120 us | **1.20** |  |  |  |" in text
    assert (
        "- [NVIDIA H100 80GB HBM3](speed/h100.md#attention): `scree-bench attention`, "
        "2026-01-01; torch 2.11." in text
    )
    assert "![overview attention](speed/overview-attention.svg)" in text
    assert "FA2" in (tmp_path / "speed" / "overview-attention.svg").read_text()


def test_machine_page_folds_tables_and_pictures(tmp_path):
    sweep().write(tmp_path / "attention-h100.json")
    page = tmp_path / "speed.md"
    invoke("report", str(tmp_path / "attention-h100.json"), "--out", str(page))
    text = (tmp_path / "speed" / "h100.md").read_text()
    assert "# Results: NVIDIA H100 80GB HBM3" in text and "\n## Attention\n" in text
    assert "Limits of the machine: copy 3 TB/s." in text and "\nCut off.\n" in text
    # Named workloads, line by line.
    assert "| seed | FA2 | 200 us ±0% (2.00x) | 600 us ±0% (2.00x) |" in text
    # The sweep: its ratios, and side by side.
    assert "| FA2 | forward | 0.50 | 0.50 | 0.50 | 2 of 2 |" in text
    assert "| FA2 | both | 0.50 | 0.50 | 0.50 | 1 of 1 |" in text
    assert "| d32 h4 n256 | 100 us ±0% | 200 us ±0% (2.00x) |" in text
    assert text.count("<details") == text.count("</details>") >= 4
    for table in re.findall(r"^\| .*$", text, re.MULTILINE):
        before = text[: text.index(table)]
        assert before.count("<details") == before.count("</details>") + 1, table
    for name in ("attention-both", "attention-shapes-forward"):
        assert (tmp_path / "speed" / f"{name}-h100.svg").exists()


def test_report_names_the_parts_of_a_command(tmp_path):
    for name in ("attention", "attention-again"):
        sweep().write(tmp_path / f"{name}-h100.json")
    page = tmp_path / "speed.md"
    invoke("report", *map(str, sorted(tmp_path.glob("*.json"))), "--out", str(page))
    assert "| attention, again | [2026-01-01](speed/h100.md#attention-again) |" in page.read_text()
    text = (tmp_path / "speed" / "h100.md").read_text()
    assert "\n## Attention, again\n" in text and "\n## Attention\n" in text
    assert (tmp_path / "speed" / "attention-both-again-h100.svg").exists()


def test_report_without_pictures_writes_the_overview_only(tmp_path):
    sweep().write(tmp_path / "attention-h100.json")
    page = tmp_path / "speed.md"
    invoke("report", str(tmp_path / "attention-h100.json"), "--out", str(page), "--no-pictures")
    assert "![" not in page.read_text() and not page.with_suffix("").exists()


def committed_runs() -> list[Result]:
    runs, messages = pages.read(sorted((DOCS / "results").glob("*-*.json")))
    assert runs and not messages
    return runs


def test_committed_overview_is_current():
    text = pages.overview(committed_runs(), "bench", lambda name, draw: "")
    message = "run: scree-bench report docs/results/*-*.json --out docs/bench.md --no-pictures"
    assert (DOCS / "bench.md").read_text(encoding="utf-8") == text, message


def test_committed_overview_has_one_table_and_picture_per_question():
    text = pages.overview(committed_runs(), "bench", lambda name, draw: f"PICTURE {name}")
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    for title in ("Attention", "Other kernels", "Training", "CPU"):
        section = sections[title]
        assert section.count("PICTURE") == 1 and section.count("| --- |\n") == 1, title
        # Losses are bold beside the wins.
        assert "**" in section and re.search(r"\| 0\.\d\d", section), title
        assert "`scree-bench " in section and "numpy 2." in section, title
    assert "| / FA4 |" in sections["Attention"] and "fastest peer" in sections["Training"]


def training_run(
    date: str,
    contenders: dict[str, float],
    precision: str = "amp",
    accumulate: int = 1,
    source: str = "a.npz",
) -> Result:
    case = {"size": "124m", "precision": precision, "tokens": 32_768, "context": 4096}
    rows = []
    for who, rate in contenders.items():
        row = Row(case | {"part": "timed", "loss": date}, who)
        row.add("step_s", [0.06] * 3)
        row.values |= {"real_tokens": rate, "mfu_share": 0.4}
        rows.append(row)
    machine, config = sweep().machine, {"recompute": "nothing", "accumulate": accumulate}
    extra = {"source": source}
    return Result("train", config, machine, {}, date, rows, extra=extra, complete=True)


@pytest.mark.parametrize("is_newest_first", [False, True])
def test_documents_one_case_in_two_runs_the_newest_wins(is_newest_first):
    runs = [
        training_run("2026-11-27T23:00:00Z", {"scree": 1e5, "padded": 2e5}),
        training_run("2026-11-28T01:00:00Z", {"scree": 4e5}),
        training_run("2026-11-28T02:00:00Z", {"scree": 5e5}, precision="bf16"),
        training_run("2026-11-28T03:00:00Z", {"scree": 3e5}, accumulate=2),
    ]
    lines = pages.documents(runs[::-1] if is_newest_first else runs).table.lines
    batch = "124m, 32,768 tokens, context 4,096"
    assert [line[1:4] for line in lines] == [
        [batch, "scree", "400 k tokens/s"],
        [batch, "padded", "200 k tokens/s"],
        [f"{batch}, bf16", "scree", "500 k tokens/s"],
        [f"{batch}, in 2 batches", "scree", "300 k tokens/s"],
    ]
    assert [line[-1] for line in lines] == ["", "0.50", "", ""]


def test_documents_two_texts_are_two_cases():
    runs = [
        training_run("2026-11-27T23:00:00Z", {"scree": 1e5, "padded": 2e5}),
        training_run("2026-11-28T01:00:00Z", {"scree": 4e5}, source="b.npz"),
    ]
    batch = "124m, 32,768 tokens, context 4,096"
    assert [line[1:3] for line in pages.documents(runs).table.lines] == [
        [f"{batch}, a.npz", "padded"],
        [f"{batch}, a.npz", "scree"],
        [f"{batch}, b.npz", "scree"],
    ]


def test_command_lines_of_committed_runs_have_options_of_the_command():
    commands = typer.main.get_command(app).commands
    for run in committed_runs():
        program, name, *words = shlex.split(page_parts.command_line(run))
        assert program == "scree-bench" and name == run.command
        options = {x for p in commands[name].params for x in (*p.opts, *p.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= options, words
    (run,) = [x for x in committed_runs() if x.part == "4 gpus settings 1.2b"]
    assert "--parts '' --settings --size 1.2b" in page_parts.command_line(run)


def test_pictures_that_pages_name_exist():
    runs = committed_runs()
    names = {name for run in runs for name in plots.pictures(run)}
    pages.overview(runs, "bench", lambda name, draw: names.add(name) or "")
    for page in [*DOCS.glob("*.md"), *DOCS.glob("guides/*.md")]:
        named = set(re.findall(r"<!-- picture: (\S+) -->", page.read_text(encoding="utf-8")))
        assert named <= names, page


def test_tables_that_guides_name_have_the_numbers_of_committed_runs():
    tables = shard_pages.guide_tables(committed_runs())
    text = (DOCS / "guides" / "multi-gpu.md").read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- table: ([\w-]+) -->", text)) == set(tables)
    for name, table in tables.items():
        assert table.lines and {len(line) for line in table.lines} == {len(table.header)}, name
    # The efficiency follows from the times of the same line.
    columns = [tables["shards-attention"].header.index(x) for x in ("GPUs", "efficiency")]
    row = next(row for run in committed_runs() for row in run.rows
               if row.who == "scree" and "step_efficiency_share" in row.values)  # fmt: skip
    shown = f"{row.values['step_efficiency_share']:.1%}"
    expected = str(row.case["processes"]), shown
    assert expected in [
        tuple(line[i] for i in columns)
        for line in tables["shards-attention"].lines
        if row.case["batch"] in line
    ]


@pytest.mark.parametrize("tag", ["cpu", "h100", "h200"])
def test_committed_machine_pages_have_scree_and_peers(tag):
    text = pages.machine_page(committed_runs(), tag, lambda name, draw: f"PICTURE {name}")
    assert len(text) < 1e6
    assert "| scree |" in text and "| padded |" in text
    assert re.search(r"\*\*\(0\.\d\dx\)\*\*", text)  # a loss
    # Names of kernels and functions do not become HTML.
    tags = re.findall(r"</?\w+", text)
    assert set(tags) == {"<details", "</details", "<summary", "</summary"}


def test_all_runs_everything(tmp_path, monkeypatch):
    calls = []

    def run(arguments):
        calls.append(arguments)
        return int(arguments[0] == "ratios")

    monkeypatch.setattr("scree_bench.cli._run", run)
    said = invoke("all", str(tmp_path), "--quick", "--device", "cpu", status=1)
    assert [name for name, *_ in calls] == list(MEASURING) and "not 0: ratios" in said
    assert calls[0] == ["memory", "--out", str(tmp_path), "--device", "cpu", "--quick"]
    assert ["ratios", "--out", str(tmp_path), "--quick"] in calls


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (
            ("overhead", "--backend", "numpy", "--device", "cpu", "--seconds", "1", "--out"),
            "overhead",
        ),
        (("all", "--quick", "--device", "cpu"), "memory"),
    ],
)
def test_ctrl_c_keeps_what_was_measured(tmp_path, arguments, name):
    """As a terminal does it: the signal goes to all processes of the group."""
    command = [sys.executable, "-m", "scree_bench", *arguments, str(tmp_path)]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
    path, until = tmp_path / f"{name}-cpu.json", time.monotonic() + 60
    while not path.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert (
        process.returncode == INTERRUPTED
        and "Interrupted: these are the measurements so far." in said
    )
    result = results.read(path)
    assert not result.complete and result.rows
    assert [path.stem for path in tmp_path.glob("*.json")] == [f"{name}-cpu"]


def test_every_option_is_explained():
    commands = typer.main.get_command(app).commands
    assert commands.keys() == {*MEASURING, "all", "report", "compare"}
    for name, command in commands.items():
        assert command.help, name
        assert not [option.name for option in command.params if not option.help], name


def test_report_without_results(tmp_path):
    invoke("report", "--out", str(tmp_path / "bench.md"))
    text = (tmp_path / "bench.md").read_text()
    assert "There are no results yet." in text
    assert all(f"`scree-bench {name}`" in text for name in MEASURING)


@pytest.mark.parametrize("arguments", [
    pytest.param(arguments, marks=needs(arguments[0])) for arguments in
    [("memory", "--backend", "numpi"), ("attention", "--work", "sed"),
     ("algorithms", "--lengths", "1,b"),
     ("overhead", "--device", "tpu"), ("norms", "--shapes", "12"), ("model", "--sizes", "huge"),
     ("kernels", "--only", "nothing"), ("block", "--dtype", "float8"),
     ("attention", "--causal", "maybe"),
     ("model", "--precisions", "fp8"), ("attention", "--heads", "0,2"),
     ("attention", "--work", "gqa", "--dim", "64"), ("collectives", "--sizes", "0"),
     ("shards", "--batches", "8", "--device", "cpu"),
     ("shards", "--mesh", "2x2", "--device", "cpu"),
     ("kernels", "--rows", "0"),
     ("kernels", "--operations", "nothing", "--quick", "--device", "cpu"),
     ("throughput", "--num-seqs", "-1"),
     ("memory", "--sigma", "-0.5")]
])  # fmt: skip
def test_bad_options_are_named(arguments):
    assert arguments[1] in invoke(*arguments, status=2)


def test_model_measures_compile_time_by_depth(tmp_path, monkeypatch):
    from scree_bench.commands import model

    monkeypatch.setattr(model, "torch_compiled", lambda f: f)
    options = "--depths", "1,2", "--steps", "2", "--quick", "--device", "cpu"
    invoke("model", *options, "--out", str(tmp_path))
    rows = json.loads((tmp_path / "model-cpu.json").read_text())["rows"]
    timed = [row["case"]["layers"] for row in rows if "compile_s" in row["values"]]
    assert timed == [1, 1, 2, 2]


@pytest.mark.needs("torch")
def test_shards_on_a_mesh_have_the_losses_of_one_process(tmp_path):
    result = quick(tmp_path, "shards", "--world", "4", "--parts", "", "--mesh", "2x2")
    assert not result.left_out
    rows = [row for row in result.rows if row.who == "scree, context 2 x data 2"]
    assert [row.case["batch"] for row in rows] == ["packed", "one document"]
    assert max(row.values["loss_error"] for row in rows) < 1e-5


@pytest.mark.needs("torch")
def test_shards_with_settings_of_data_parallel_training_have_the_losses_of_one_process(tmp_path):
    result = quick(tmp_path, "shards", "--parts", "", "--settings")
    assert not result.left_out
    rows = [row for row in result.rows if row.who.startswith("scree, data parallel")]
    assert len({row.case["batch"] for row in rows}) == 2 and len(rows) == 7
    for row in rows:
        assert row.values["loss_error"] < (1e-4 if "bfloat16" in row.who else 1e-6), row.who


@pytest.mark.parametrize(("error", "counts"), [(None, 2), (KeyboardInterrupt, 1)])
def test_shards_lists_the_parts_that_did_not_end(monkeypatch, error, counts):
    """The processes end after the first part, or the user interrupts the second."""
    from scree_bench.commands import shards

    class Job(NamedTuple):
        parts: tuple[str, ...] = "first", "second", "third"

    starts = []

    def run_processes(world, job):
        starts.append(job.parts)
        if len(starts) == 1:
            yield {"done": "first", "seconds": 1.0}
        if error is not None:
            raise error

    monkeypatch.setattr(shards, "_run_processes", run_processes)
    left_out = []
    session = SimpleNamespace(
        result=SimpleNamespace(extra={}),
        track=iter,
        leave_out=lambda what, why: left_out.append(what),
    )
    with pytest.raises(error) if error else nullcontext():
        shards._measure(session, 2, Job())
    assert left_out == ["second", "third"]
    assert len(starts) == counts


@pytest.mark.needs("torch")
def test_shards_lists_the_error_of_one_process_and_runs_the_next_part(tmp_path):
    peer = tmp_path / "peer" / "ring_flash_attn"
    peer.mkdir(parents=True)
    # Without an end of all processes, the first process waits for the time-out of the group.
    (peer / "llama3_flash_attn_varlen.py").write_text(
        "import torch.distributed as dist\n"
        "if dist.get_rank() == 1:\n"
        "    raise RuntimeError('the second process failed')\n"
        "dist.barrier()\n"
    )
    options = "--parts", "attention", "--batches", "0,1", "--peers", str(peer.parent)
    start = time.perf_counter()
    result = quick(tmp_path, "shards", *options)
    assert time.perf_counter() - start < 60
    assert [entry["what"].split(":")[0] for entry in result.left_out] == ["peers", "peers"]
    assert all("the second process failed" in entry["why"] for entry in result.left_out)
    assert {row.case["batch"] for row in result.rows} == {
        "one document of 128",
        "128 packed, median 16",
    }
