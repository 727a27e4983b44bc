"""Training of language models on documents of any length: text, models, forms, and the loop."""
