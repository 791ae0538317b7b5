"""How data sets of other trainers are laid out: each module recognizes one convention and describes it."""
