"""Commands of the tests of trainers."""

from small_cache import run

__all__ = ["run"]
