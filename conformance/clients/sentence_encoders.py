"""Encoders of sentence-transformers with random weights: BERT and ModernBERT.

`python conformance/clients/sentence_encoders.py CHECKOUT` encodes sentences of several lengths with
`attn_implementation="scree"` and `"sdpa"`, and takes training steps with a loss of the package.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from common import open_checkout, report

WORDS = [f"w{i}" for i in range(60)]


def save_model(kind: str, folder: Path) -> None:
    """Write a small model with random weights and its tokenizer."""
    import torch
    import transformers

    size = dict(
        vocab_size=66, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=128, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    config: Any
    if kind == "bert":
        config = transformers.BertConfig(**size, attention_probs_dropout_prob=0.0,
                                         hidden_dropout_prob=0.0)  # fmt: skip
    else:
        config = transformers.ModernBertConfig(
            **size, global_attn_every_n_layers=2, local_attention=8, cls_token_id=2, sep_token_id=3,
            bos_token_id=2, eos_token_id=3,
        )  # fmt: skip
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])
    )
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=128)
    tokenizer.save_pretrained(folder)


def main() -> None:
    checkout = open_checkout()
    import torch
    from sentence_transformers import SentenceTransformer, losses

    import scree

    scree.bridges.transformers.register()
    sentences = [
        " ".join(WORDS[(7 * i + 3 * j) % 60] for j in range(n))
        for i, n in enumerate((3, 40, 1, 17, 100, 8))
    ]
    differences = {}
    for kind in ("bert", "modernbert"):
        results = []
        with tempfile.TemporaryDirectory() as name:
            save_model(kind, Path(name))
            for attention in ("scree", "sdpa"):
                arguments = {"attn_implementation": attention}
                model = SentenceTransformer(name, model_kwargs=arguments)
                assert model[0].auto_model.config._attn_implementation == attention
                embeddings = model.encode(sentences, convert_to_tensor=True)
                loss_function: Any = losses.MultipleNegativesRankingLoss(model.train())
                features = [
                    {key: x.to(model.device) for key, x in model.tokenize(part).items()}
                    for part in (sentences[:3], sentences[3:])
                ]
                loss = loss_function(features, None)
                loss.backward()
                gradient = torch.cat(
                    [p.grad.flatten() for p in model.parameters() if p.grad is not None]
                )
                results.append((embeddings, loss.detach(), gradient))
        differences[kind] = [
            float((a - b).norm() / b.norm()) for a, b in zip(results[0], results[1])
        ]
    report(
        "sentence-transformers", checkout,
        relative_differences_of_embeddings_loss_gradients=differences,
    )  # fmt: skip
    if max(map(max, differences.values())) > 1e-3:
        raise SystemExit("expected the results of sdpa")


if __name__ == "__main__":
    main()
