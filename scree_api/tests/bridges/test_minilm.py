"""MiniLM's weights in the BERT model of transformers, on real paragraphs.

The first run downloads the weights of the demo (83 MB).
"""

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import scree
from scree.bridges import to_hf_flattened, to_hf_padded
from scree.bridges import transformers as bridge
from scree.demo import text, weights

CONFIG = dict(
    vocab_size=weights.VOCABULARY,
    hidden_size=384,
    intermediate_size=1536,
    num_hidden_layers=6,
    num_attention_heads=12,
    max_position_embeddings=weights.MAX_TOKENS,
)


@pytest.mark.parametrize("peer", ["sdpa", "eager"])
def test_embeddings_agree_with_transformers(peer: str) -> None:
    bridge.register()
    fetched = weights.fetch()
    state = load_file(fetched / "model.safetensors")

    def model(attention: str) -> transformers.BertModel:
        config = transformers.BertConfig(**CONFIG)
        config._attn_implementation = attention
        made = transformers.BertModel(config, add_pooling_layer=False).eval()
        missing = made.load_state_dict(state, strict=False).missing_keys
        assert all("_ids" in name for name in missing)
        return made

    token_ids = text.word_pieces(fetched / "tokenizer.json")(
        text.sample(text.paragraphs(), 32, seed=0)
    )
    tokens = scree.pack([torch.tensor(row) for row in token_ids])
    padded, mask = to_hf_padded(tokens)
    flat = to_hf_flattened(tokens)
    with torch.no_grad():
        expected = model(peer)(input_ids=padded, attention_mask=mask).last_hidden_state[mask.bool()]
        scree_model = model("scree")
        results = [
            scree_model(input_ids=padded, attention_mask=mask).last_hidden_state[mask.bool()],
            scree_model(**flat).last_hidden_state[0],
        ]
    bound = 32 * np.finfo(np.float32).eps * float(expected.abs().max())  # six layers of float32
    for x in results:
        assert float((x - expected).abs().max()) < bound
