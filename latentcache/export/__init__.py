"""For whom else? Token caches as folders that trainers read without this package."""
