"""How made? Decode, batch, encode, write: bounded in memory, resumable at any moment."""
