"""Write `docs/attention-speed.md` and its picture from `docs/results`, which `scree_bench.gpu_attention` measures."""

import json
import statistics
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NAMES = {
    "seed": "16 rows of 192 to 2,048 tokens, 16 heads x 64, float16",
    "seed bf16": "the same, bfloat16",
    "hd128": "8 rows, 16,384 tokens, 16 heads x 128, bfloat16",
    "gqa": "the same, 32 query heads on 8 key heads",
    "small": "16 rows of about 256 tokens, 4 heads x 32, float16",
    "fp32": "the lengths of the first, float32",
    "skewed": "one row of 32,768 tokens and 255 of 128, 16 heads x 128, bfloat16",
}
SHOWN = ("ours", "ours, autograd", "FA2", "FA3", "FA4", "memory-efficient")
FILLS = {"ours": "#1f77b4", "FA2": "#c7c7c7", "FA3": "#a8d5a2", "FA4": "#ffbf79", "memory-efficient": "#d6b3e6"}
TEXT = "#7d8590"  # legible on white and on black


def table(results: dict[str, Any], what: str, factor: float) -> list[str]:
    """Milliseconds of each contender; for ours also the share of the chip's matrix rate that useful work reaches."""
    shown = [who for who in SHOWN if any(who in row[what] for row in results["workloads"].values())]
    lines = ["| workload | ours | of the chip | " + " | ".join(shown[1:]) + " |", "|---" * (len(shown) + 2) + "|"]
    for name, row in results["workloads"].items():
        times = row[what]
        share = factor * row["gflop"] / times["ours"] / results["limits"]["matmul_tflops"]
        cells = [f"{times[who]:.3f}" if who in times else "" for who in shown]
        lines.append(f"| {NAMES[name]} | **{cells[0]}** | {share:.0%} | " + " | ".join(cells[1:]) + " |")
    return lines


def ratios(grid: dict[str, Any], what: str, peer: str) -> str:
    """The median of ours over a peer on the shapes, and the worst."""
    found = sorted(row[what]["ours"] / row[what][peer] for row in grid.values() if peer in row[what])
    return f"{statistics.median(found):.2f} | {found[0]:.2f} to {found[-1]:.2f} | {sum(x <= 1 for x in found)} of {len(found)}"


def page(results: dict[str, Any], earlier: dict[str, Any]) -> str:
    """The page, in Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    host = results["host_us"]
    lines = [
        "# Speed of attention on a GPU", "",
        "<!-- Written by docs/attention_speed.py from docs/results; do not edit. -->", "",
        f"Measured on {results['date']} on one {results['device']} with {versions},",
        "by `python -m scree_bench.gpu_attention`: one process, the same inputs, in turn, medians of CUDA events, the",
        "L2 cache cleared before each call; the less of two runs for every kernel. All are causal. The chip itself multiplied",
        f"matrices at {results['limits']['matmul_tflops']:.0f} TFLOP/s (bfloat16) and copied at",
        f"{results['limits']['copy_tb_s']:.2f} TB/s; *of the chip* is the share of the former that useful operations reach.",
        "",
        "![Forward time of ours and of other kernels](attention-speed.svg)", "",
        "## Forward, milliseconds", "", *table(results, "forward_ms", 1.0), "",
        "## Forward and backward, milliseconds", "",
        "Ours, FA2 and memory-efficient call their two halves directly; FA4 goes through autograd.", "",
        *table(results, "forward_backward_ms", 3.5), "",
        "## Twenty-seven shapes", "",
        "head_dim 32, 64, 128; 4, 8, 16 heads; 16 log-normal rows of 256, 1,024, 2,048 tokens; bfloat16. Ours over the peer,",
        "less is better. Backward through autograd for ours and FA4, directly for FA2: where rows are few and short, host time",
        "decides.", "",
        "| | peer | median | from, to | not slower on |", "|---|---|---|---|---|",
        *(f"| {title} | {peer} | {ratios(earlier['grid'], what, peer)} |"
          for title, what in (("forward", "forward_ms"), ("forward + backward", "forward_backward_ms"))
          for peer in ("FA2", "FA4")), "",
        "## Host time of a call, microseconds", "",
        "| | " + " | ".join(who for who in host["forward_backward"]) + " |",
        "|---" * (1 + len(host["forward_backward"])) + "|",
        *(f"| {what.replace('_', ' + ')} | " + " | ".join(
            f"{host[what][who]:.0f}" if who in host[what] else "" for who in host["forward_backward"]) + " |"
          for what in ("forward", "forward_backward")), "",
        "## Notes", "",
        *(f"- {note}" for note in results["notes"] + earlier["notes"]),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def picture(results: dict[str, Any]) -> str:
    """Bars of the forward times, each workload on its own scale."""
    height, width, left, out, y = 16, 420, 120, [], 20
    for name, row in results["workloads"].items():
        times = {who: row["forward_ms"][who] for who in SHOWN if who in row["forward_ms"]}
        out.append(f'<text x="{left - 10}" y="{y + 12}" text-anchor="end" font-weight="bold" fill="{TEXT}">{name}</text>')
        for who, ms in times.items():
            length = width * ms / max(times.values())
            out.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{height - 3}" rx="2" fill="{FILLS[who]}"/>')
            out.append(f'<text x="{left + length + 6:.1f}" y="{y + 11}" fill="{TEXT}">{who} {ms:.3f} ms</text>')
            y += height
        y += 12
    right = left + width + 170
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right} {y}" width="{right}" height="{y}" '
        'font-family="system-ui, sans-serif" font-size="12" role="img" '
        'aria-label="Forward time of ragged attention by workload and kernel">\n' + "\n".join(out) + "\n</svg>\n"
    )


def main() -> None:
    """Write the page and the picture."""
    results, earlier = (
        json.loads((HERE / "results" / name).read_text(encoding="utf-8"))
        for name in ("attention-h100.json", "attention-earlier-h100.json")
    )
    for name, row in results["workloads"].items():
        for what in ("forward_ms", "forward_backward_ms"):
            for who, ms in earlier["workloads"][name][what].items():
                row[what][who] = min(ms, row[what].get(who, ms))
    (HERE / "attention-speed.md").write_text(page(results, earlier), encoding="utf-8")
    (HERE / "attention-speed.svg").write_text(picture(results), encoding="utf-8")


if __name__ == "__main__":
    main()
