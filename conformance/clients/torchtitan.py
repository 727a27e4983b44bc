"""torchtitan's Llama 3 debug model with its backend `varlen`, on packed documents.

`python conformance/clients/torchtitan.py CHECKOUT` gives the model `varlen_attn` of scree, and compares losses
and gradients with the model on one document at a time. The layer computes in bfloat16.
"""

from __future__ import annotations

from typing import Any

from common import open_checkout, report


def main() -> None:
    checkout = open_checkout()
    import torch
    from torchtitan.models.common import attention
    from torchtitan.models.llama3 import model_registry

    from scree.bridges.varlen import varlen_attn

    device = "cuda" if torch.cuda.is_available() else "cpu"
    module: Any = attention
    module.varlen_attn = varlen_attn
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = model_registry("debugmodel", attn_backend="varlen").model.build()
        model.init_states()
    lengths = [37, 1, 90, 20]
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
    tokens = torch.randint(2048, (len(positions),), device=device)

    def run(ids: Any, places: Any) -> Any:
        masks = model.get_attention_masks(places)
        return model(ids, attention_masks=masks, positions=places)

    results = []
    for is_packed in (True, False):
        if is_packed:
            logits = run(tokens, positions)
        else:
            parts = zip(tokens.split(lengths), positions.split(lengths))
            logits = torch.cat([run(*part) for part in parts])
        loss = torch.nn.functional.cross_entropy(logits.float(), tokens.roll(-1))
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        results.append((loss.item(), gradients))
    (packed, gradients), (expected, expected_gradients) = results
    difference = max(
        float((a - b).norm() / b.norm()) for a, b in zip(gradients, expected_gradients)
    )
    report(
        "torchtitan", checkout, losses=[round(packed, 6), round(expected, 6)],
        largest_relative_difference_of_gradients=difference,
    )  # fmt: skip
    if abs(packed - expected) > 1e-3 or difference > 3e-2:
        raise SystemExit("expected the results of one document at a time")


if __name__ == "__main__":
    main()
