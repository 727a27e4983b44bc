"""Indexing and functional updates."""
