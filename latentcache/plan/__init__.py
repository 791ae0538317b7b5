"""The order of training: batches, epochs, mixing, packing and resume, computed from numbers alone (numpy only)."""
