"""Export documents and rows as files that trainers read without this package, and check them."""
