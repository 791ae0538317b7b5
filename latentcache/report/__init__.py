"""Facts about data, caches and machines as values, for commands, pages and notebooks alike."""
