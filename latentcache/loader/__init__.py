"""Batches of one shape from a finished cache, for a trainer. Needs torch, never an encoder."""
