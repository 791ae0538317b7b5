"""What a trainer imports: batches of one shape from a finished cache. Needs torch, never an encoder."""
