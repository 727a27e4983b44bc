"""The demo: real paragraphs of very different lengths through a pretrained sentence encoder.

``python -m scree demo`` runs it on every backend. `model` is the encoder on ragged arrays, `padded`
the same encoder on padded batches. `weights` and `text` provide the inputs, `run` measures, and
`report` prints.

``python -m scree demo --generate`` continues the paragraphs with a decoder and a paged cache:
`generate`.

``python -m scree train-demo`` trains a language model: `lm` is the model, `train` the training.
"""


class DemoError(Exception):
    """An error that the user can fix; the message says how."""
