"""How fed? What a trainer imports: batches of one shape from a finished cache. Torch, never an encoder."""
