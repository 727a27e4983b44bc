"""Results of the scripts that measure the Triton kernels alone, brought into the form of all others.

`scree_bench.gpu_attention` and `scree_bench.gpu_kernels` write forms of their own; this reads them so that `report` shows them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .measure import FAILED
from .results import Result, Row

#: End of a name there -> end of the name here, and the factor between.
NAMES = {"_gb_s": ("_rate", 1e9), "_tflop_s": ("_flops", 1e12), "_ms": ("_s", 1e-3), "_us": ("_host_s", 1e-6)}
LIMITS = {"copy_tb_s": ("copy_rate", 1e12), "matmul_tflops": ("matmul_bfloat16_flops", 1e12)}


def adopt(data: dict[str, Any], path: Path) -> Result | None:
    """The result that a file holds, or None if it is of neither script."""
    command = path.stem.partition("-")[0]
    if not isinstance(data.get("device"), str) or not ({"rows", "workloads"} & data.keys()):
        return None
    machine: dict[str, Any] = {"device": "cuda", "gpu": data["device"], "tag": path.stem.partition("-")[2] or "cuda"}
    limits = data.get("limits", {})
    machine["limits"] = {new: limits[old] * factor for old, (new, factor) in LIMITS.items() if old in limits}
    versions = data.get("versions") or {k: data[k] for k in ("scree", "torch", "triton") if k in data}
    rows = _flat(data["rows"]) if "rows" in data else _nested(data)
    script = "gpu_kernels" if "rows" in data else "gpu_attention"
    extra = {"notes": [f"Measured by `python -m scree_bench.{script}`, which says how in its first lines.", *data.get("notes", [])]}
    return Result(command, {}, machine, versions, data.get("date", ""), rows, extra=extra, complete=True)


def _flat(rows: list[dict[str, Any]]) -> list[Row]:
    found = []
    for row in rows:
        new = Row({"operation": row["operation"], "size": row["size"]}, row["who"])
        for name, x in row.items():
            for end, (other, factor) in NAMES.items():
                if name.endswith(end):
                    new.values[name.removesuffix(end) + other] = x * factor
        if "error" in row:
            new.status, new.why = FAILED, row["error"]
        found.append(new)
    return found


def _nested(data: dict[str, Any]) -> list[Row]:
    found: dict[tuple[str, str], Row] = {}
    for name, work in {**data["workloads"], **data.get("grid", {})}.items():
        case = {"work": name, **{k: x for k, x in work.items() if k != "gflop" and not isinstance(x, dict)}}
        for phase, value, cost in (("forward", "forward", 1.0), ("forward_backward", "both", 3.5)):
            for who, ms in work.get(f"{phase}_ms", {}).items():
                who = who.replace("ours", "scree")
                row = found.setdefault((name, who), Row(case, who))
                row.values[f"{value}_s"] = ms * 1e-3
                if "gflop" in work:
                    row.values[f"{value}_flops"] = cost * work["gflop"] * 1e9 / (ms * 1e-3)
    for phase, times in data.get("host_us", {}).items():
        for who, us in times.items():
            who = who.replace("ours", "scree")
            value = {"forward": "forward_host_s", "forward_backward": "both_host_s"}[phase]
            found.setdefault(("host", who), Row({"host time of a call": "tiny input"}, who)).values[value] = us * 1e-6
    return list(found.values())
