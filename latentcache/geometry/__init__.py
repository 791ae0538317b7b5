"""Sizes, buckets and placement: integers in, integers out, standard library only."""
