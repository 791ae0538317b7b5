"""FOR WHOM ELSE: one trainer or format per file."""
