"""What a path or a URL is, what it can give at most, and how it is written to without harm."""
