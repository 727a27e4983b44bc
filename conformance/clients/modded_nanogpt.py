"""The attention layer of modded-nanogpt, taken from its training script, on packed documents.

`python conformance/clients/modded_nanogpt.py CHECKOUT` gives the layer `flash_attn_varlen_func` of scree, and
compares outputs and gradients with one call of PyTorch's attention per document.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from common import definitions, open_checkout, report

NAMES = {"norm", "Yarn", "AttnArgs", "dc_gate", "CausalSelfAttention"}


def main() -> None:
    checkout = open_checkout()
    import torch
    from torch.nn import functional

    from scree.bridges.flash_attn import v3

    def by_documents(
        q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, softmax_scale: float, window_size: Any,
        **unused: Any
    ) -> Any:  # fmt: skip
        rows = []
        for begin, end in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist()):
            places = torch.arange(end - begin, device=q.device)
            distance = places[:, None] - places
            mask = (distance >= 0) & (distance <= window_size[0])
            row = functional.scaled_dot_product_attention(
                *(x[begin:end].transpose(0, 1)[None] for x in (q, k, v)),
                attn_mask=mask, scale=softmax_scale,
            )  # fmt: skip
            rows.append(row[0].transpose(0, 1))
        return torch.cat(rows)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    interface = SimpleNamespace()
    namespace = {
        "torch": torch, "F": functional, "nn": torch.nn, "Tensor": torch.Tensor, "math": math,
        "dataclass": dataclass, "device": device, "flash_attn_interface": interface,
    }  # fmt: skip
    file = definitions(checkout / "train_gpt.py", NAMES, namespace)
    dim, heads, total = 256, 4, 192
    ends = [0, 40, 41, 111, 150, 192] + [192] * 11  # documents, and empty rows as in its batches
    seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
    differences = {}
    for paired in (False, True):
        torch.manual_seed(0)
        layer = file["CausalSelfAttention"](dim, dim // heads, heads, paired)
        head_dim = dim // heads
        yarn = file["Yarn"](head_dim, total, paired)
        x = torch.randn(1, total, dim, device=device, dtype=dtype)
        weights = (torch.randn(4 * dim, dim, device=device) * dim**-0.5).to(dtype)
        upstream = torch.randn(1, total, dim, device=device, dtype=dtype)
        results = []
        for function in (v3.flash_attn_varlen_func, by_documents):
            interface.flash_attn_varlen_func = function
            inputs = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
            arguments = file["AttnArgs"](
                sa_lambdas=torch.ones(2, device=device, dtype=dtype), seqlens=seqlens, bm_size=32,
                yarn=yarn, key_offset=False, attn_gate_w=None, aux_v=None,
                xsa_alpha=None if paired else torch.full((1, total, heads), 0.5, device=device),
                train_max_seq_len=total,
            )  # fmt: skip
            out = layer.train()(inputs[0], arguments, inputs[1])
            results.append([out, *torch.autograd.grad(out, inputs, upstream)])
        differences["paired" if paired else "plain"] = max(
            float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results)
        )
    report("modded-nanogpt", checkout, largest_relative_difference=differences)
    if max(differences.values()) > (2e-2 if device == "cuda" else 1e-4):
        raise SystemExit("expected the results of one call per document")


if __name__ == "__main__":
    main()
