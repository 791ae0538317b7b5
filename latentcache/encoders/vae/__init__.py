"""Image autoencoders: found, described, loaded and run."""
