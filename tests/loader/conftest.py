from small_cache import cache, data, run

__all__ = ["cache", "data", "run"]
