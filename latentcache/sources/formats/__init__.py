"""Formats of source files: positions and bytes, no policy."""
