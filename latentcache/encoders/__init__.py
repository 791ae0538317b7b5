"""By which model? The only folder that may import diffusers or transformers."""
