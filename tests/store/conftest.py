from small_cache import open_folder

__all__ = ["open_folder"]
