"""From measured saves to runs, years, failures, money and larger models."""
