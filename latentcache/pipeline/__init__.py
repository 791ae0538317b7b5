"""How a cache is made: difference, units, workers, commits; bounded in memory, resumable at any moment."""
