"""As what bytes? Entry headers, LMDB shards, generations and the column index. No torch."""
