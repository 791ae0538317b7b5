"""Tokenizers: found, described, checked and run."""
