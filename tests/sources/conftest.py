from small_cache import run

__all__ = ["run"]
