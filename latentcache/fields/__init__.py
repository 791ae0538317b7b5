"""Field kinds: what a tensor of a sample is, how it is keyed, stored, checked and served."""
