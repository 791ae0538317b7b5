"""Export caches as files that trainers and other programs read without this package, and check them."""
