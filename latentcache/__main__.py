"""``python -m latentcache``."""

from latentcache.cli.app import run

if __name__ == "__main__":
    run()
