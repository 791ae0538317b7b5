"""The version, in a module that nothing else is behind."""

__version__ = "0.2.0"
