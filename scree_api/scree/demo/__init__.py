"""The demo: real paragraphs of very different lengths through a real sentence encoder, on every backend.

`model` is the encoder, `padded` its rival, `weights` and `text` what goes in, `run` the measurement and `report` what
is printed. It runs as ``python -m scree demo``. `lm` is a language model and `train` its training, ``python -m scree train-demo``.
"""


class DemoError(Exception):
    """What the user can mend; the message says how."""
