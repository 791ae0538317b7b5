"""In what order? Batches, the policy for short buckets and the order of an epoch: numpy only."""
