"""Still true? Checks of a cache against its sources and itself, repair, and collection of garbage."""
