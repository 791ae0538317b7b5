"""The build of a cache: difference, units, workers, commits; bounded in memory, resumable at any moment."""
