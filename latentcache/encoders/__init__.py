"""Encoders and tokenizers: the only folder that imports diffusers or transformers."""
