"""latentcache: latents computed once, proven true on demand, served in batches that are right by construction."""
