"""Emulated storage on real kernel I/O: built, held against arithmetic, swept."""
