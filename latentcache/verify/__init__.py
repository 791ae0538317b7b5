"""Check a cache against its sources and itself, repair it, collect its garbage."""
