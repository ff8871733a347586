"""Checks of the instrument itself: coverage, speed, and checkpoints that survive."""
