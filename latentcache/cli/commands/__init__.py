"""One module a command: a function of its name, ``HELP`` and ``EXAMPLES``."""
