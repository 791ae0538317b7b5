"""Tokens as files that trainers read without this package: rows of one length, or whole documents."""
