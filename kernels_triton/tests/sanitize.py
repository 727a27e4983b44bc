"""Run attention and its gradients under compute-sanitizer: `nox -s sanitize`.

The cases cover every kind of kernel on a few short rows. Arguments are indices of cases; without
arguments all cases run.
"""

import sys

import torch
from attention_reference import Case, problem

from scree_triton.attention import launch_configs
from scree_triton.attention.interface import make_spec
from scree_triton.attention.launch_configs import VarlenLayout, get_launch_config

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
ROWS, OTHERS = (165, 0, 130, 7), (70, 5, 164, 1)
SHORT, MORE_SHORT = (7, 0, 20, 30, 64, 1, 90), (9, 1, 20, 0, 64, 1, 40)
CASES = [
    *(
        Case(dtype, dim, dim_v, 2, 1, ROWS, causal=True, slack=20)
        for dtype, dim, dim_v in (
            (F16, 32, 32),
            (F16, 64, 64),
            (BF16, 128, 128),
            (F32, 64, 64),
            (F16, 96, 96),
            (BF16, 192, 128),
            (BF16, 256, 256),
            (F16, 16, 16),
            (F32, 128, 128),
        )
    ),
    *(
        Case(dtype, dim, dim_v, 2, 1, ROWS, OTHERS, window=(33, 20), softcap=15.0, alibi=True)
        for dtype, dim, dim_v in (
            (F16, 64, 64),
            (BF16, 128, 128),
            (F32, 32, 32),
            (F16, 40, 24),
            (F16, 256, 256),
            (F16, 16, 16),
        )
    ),
    Case(F16, 64, 64, 2, 2, ROWS, OTHERS),
    *(
        Case(dtype, dim, dim, 2, 1, SHORT, k_lengths, causal=True, slack=20)
        for dtype, dim in ((F16, 32), (BF16, 64), (F16, 128), (BF16, 256))
        for k_lengths in (None, MORE_SHORT)
    ),
]


def main() -> None:
    """Run the cases given as arguments."""
    launch_configs.MANY_ROWS = 1
    for case in [CASES[int(i)] for i in sys.argv[1:]] or CASES:
        p = problem(case, "cuda")
        # Only calls with a bound on the longest row can share tiles.
        is_short = case.q_lengths is SHORT
        layout = VarlenLayout(p.cu_q, p.cu_k, {}, *([max(SHORT)] if is_short else []))
        spec = make_spec(case.causal, *case.window, case.dim**-0.5, case.softcap)
        config = get_launch_config(p.q, p.k, p.v, layout, spec, case.alibi)
        out, lse = config.forward(p.q, p.k, p.v, p.slopes, layout, spec)
        config.backward(p.q, p.k, p.v, p.slopes, out, lse, p.dout, p.dlse.t(), layout, spec)
        torch.cuda.synchronize()
        print(case.name, type(config).__name__, flush=True)


if __name__ == "__main__":
    main()
