"""Which equations only move numbers, and compute none."""

# What these make of one number are copies of it.
SPREAD = {"broadcast_in_dim", "copy", "pvary", "reshape", "squeeze"}
