"""Saves of a full training state: what it is, the ways to write it, and the protocol that loses nothing."""
