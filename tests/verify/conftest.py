from small_cache import cache, data, open_folder, run, shared

__all__ = ["cache", "data", "open_folder", "run", "shared"]
