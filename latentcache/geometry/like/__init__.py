"""Sizes as other trainers choose them, so that an export has the shapes that they expect.

Integers come out; in between the functions compute with floats exactly as the trainer does. Only sizes are theirs:
our one kernel resizes the pixels.
"""
