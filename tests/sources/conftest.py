from small_cache import open_folder, run

__all__ = ["open_folder", "run"]
