"""The front door: one file per command; the only user of typer and rich."""
