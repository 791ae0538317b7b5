"""Layouts of data sets of other trainers: each module recognizes one convention and describes it."""
