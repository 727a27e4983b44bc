"""Fine-tuning with transformers' Trainer: packed on scree, packed on varlen_attn, and padded.

``python docs/guides/fine_tuning.py`` trains a causal language model and a classifier of documents
in each form, on the same documents in the same order, and prints tokens/s and the losses. The
models have random weights; with ``--model FOLDER`` the language model is yours.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from torch.nn.functional import cross_entropy

import scree
from scree_bench.training import text

CUDA = torch.cuda.is_available()
#: Steps before the clock starts.
WARM_UPS = 5


# --- batches ---
def packed(features):
    """Return one row with the tokens of all documents."""
    ids = scree.from_lists([feature["input_ids"] for feature in features])
    ids = scree.Array(torch.from_numpy(ids.values), torch.from_numpy(np.asarray(ids.offsets)))
    return dict(scree.bridges.to_hf_flattened(ids, labels=ids))


def padded(features):
    """Return one row per document, padded to the longest."""
    ids = scree.from_lists([feature["input_ids"] for feature in features])
    ids, mask = map(torch.from_numpy, scree.to_padded(ids))
    labels = torch.where(mask, ids, -100)
    labels[:, 0] = -100  # as in the packed form, so that both count the same targets
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def with_classes(collate):
    """Return a collator whose labels are the classes of the documents."""

    def collate_classes(features):
        classes = torch.tensor([feature["label"] for feature in features])
        return {**collate(features), "labels": classes}

    return collate_classes


class Classifier(torch.nn.Module):
    """BERT and a linear head on the first token of each document, packed or padded."""

    def __init__(self, config):
        super().__init__()
        self.bert = transformers.BertModel(config, add_pooling_layer=False)
        self.head = torch.nn.Linear(config.hidden_size, 2)

    def forward(self, input_ids, labels, **batch):
        """Return the loss and the logits."""
        # BERT's default has no more entries than positions; a packed row is longer.
        kinds = torch.zeros_like(input_ids)
        hidden = self.bert(input_ids, token_type_ids=kinds, **batch).last_hidden_state
        if "cu_seq_lens_q" in batch:
            first = hidden[0, batch["cu_seq_lens_q"][:-1]]
        else:
            first = hidden[:, 0]
        logits = self.head(first)
        return {"loss": cross_entropy(logits.float(), labels), "logits": logits}


# --- the attention of another project, to compare with ---
def varlen_attention(module, query, key, value, mask, scaling=None, **options):
    """Run PyTorch's attention of packed rows on (1, heads, tokens, dim)."""
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    heads = query.shape[1] // key.shape[1]
    # FlashAttention takes no float32, which the rotation returns under autocast.
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
    k, v = (x.repeat_interleave(heads, 1) if heads > 1 else x for x in (k, v))
    offsets, longest = options["cu_seq_lens_q"], int(options["max_length_q"])
    is_causal = options.get("is_causal")
    is_causal = module.is_causal if is_causal is None else is_causal
    has_flag = "is_causal" in inspect.signature(varlen_attn).parameters
    causal = {"is_causal": is_causal} if has_flag else {"window_size": (-1, 0 if is_causal else -1)}
    out = varlen_attn(q, k, v, offsets, offsets, longest, longest, scale=scaling, **causal)
    return out[None], None


def register():
    """Register both implementations."""
    scree.bridges.transformers.register()
    transformers.AttentionInterface.register("varlen_attn", varlen_attention)
    transformers.AttentionMaskInterface.register("varlen_attn", lambda *args, **kwargs: None)


# --- training ---
class Clock(transformers.TrainerCallback):
    """The times at which steps end."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, *args, **kwargs):
        """Wait for the device, and note the time."""
        if CUDA:
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def train(make_model, documents, collate, rows, steps, rate):
    """Return the seconds of the steps after the warm-up, and the loss of each step."""
    transformers.set_seed(0)
    clock, model = Clock(), make_model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=rows, learning_rate=rate,
            bf16=CUDA, use_cpu=not CUDA, logging_steps=1, report_to="none", save_strategy="no",
            remove_unused_columns=False, disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model, arguments, data_collator=collate, train_dataset=documents, callbacks=[clock]
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return np.diff(clock.ends[WARM_UPS - 1 :]), [float(loss) for loss in losses]


def main():
    """Compare the forms on both tasks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, help="file or folder; see scree-bench train --help")
    parser.add_argument("--model", help="folder of a causal language model")
    parser.add_argument("--rows", type=int, default=32 if CUDA else 8)
    parser.add_argument("--steps", type=int, default=40 if CUDA else 10)
    parser.add_argument("--context", type=int, default=1024 if CUDA else 128)
    parser.add_argument("--out", type=Path, help="JSON with the results")
    options = parser.parse_args()
    register()
    width, layers = (768, 12) if CUDA else (64, 2)
    loaded = text.load(options.text, None, 32_768 if CUDA else 512, options.context)
    middle = int(np.median(loaded.lengths))
    # A stand-in for real classes: whether a document is longer than the median.
    documents = [
        {"input_ids": row.tolist(), "label": int(len(row) > middle)}
        for row in scree.unpack(loaded.tokens)[: options.rows * options.steps]
    ]
    sizes = {
        "vocab_size": 32_768 if CUDA else 512, "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": width // 64 if CUDA else 4, "max_position_embeddings": options.context,
    }  # fmt: skip

    def language_model(attention):
        if options.model:
            return transformers.AutoModelForCausalLM.from_pretrained(
                options.model, attn_implementation=attention
            )
        config = transformers.LlamaConfig(
            **sizes, intermediate_size=8 * width // 3, attn_implementation=attention
        )
        return transformers.LlamaForCausalLM(config)

    def classifier(attention):
        config = transformers.BertConfig(
            **sizes, intermediate_size=4 * width, attn_implementation=attention,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return Classifier(config)

    tasks = {
        "causal language model": (language_model, packed, padded, 3e-4),
        "classifier": (classifier, with_classes(packed), with_classes(padded), 5e-5),
    }
    forms = {"scree, packed": "scree", "varlen_attn, packed": "varlen_attn", "sdpa, padded": "sdpa"}
    if not CUDA:
        del forms["varlen_attn, packed"]  # runs on CUDA devices only
    tokens = sum(len(document["input_ids"]) for document in documents) / options.steps
    results = []
    for task, (make, pack, pad, rate) in tasks.items():
        for form, attention in forms.items():
            collate = pad if form == "sdpa, padded" else pack
            if CUDA:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            seconds, losses = train(
                lambda make=make, attention=attention: make(attention),
                documents, collate, options.rows, options.steps, rate,
            )  # fmt: skip
            peak = torch.cuda.max_memory_allocated() if CUDA else 0
            result = {
                "task": task, "form": form, "tokens_per_second": tokens / seconds.mean(),
                "step_ms": 1e3 * float(np.median(seconds)), "first_loss": losses[0],
                "last_loss": losses[-1], "peak_bytes": peak,
            }  # fmt: skip
            results.append(result)
            print(
                f"{task:22} {form:20} {result['tokens_per_second']:10,.0f} tokens/s  "
                f"loss {losses[0]:.4f} -> {losses[-1]:.4f}  peak {peak / 2**30:.1f} GiB",
                flush=True,
            )
            if options.out:
                device = torch.cuda.get_device_name() if CUDA else "cpu"
                about = {"device": device, "torch": torch.__version__, "results": results}
                options.out.write_text(json.dumps(about, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
