"""Norms, rotary embedding and SwiGLU."""
