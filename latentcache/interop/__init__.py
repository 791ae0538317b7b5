"""For whom else? Rows of tokens as folders that trainers read without this package."""
