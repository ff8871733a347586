"""Storage under load: small files, saves and a log at once, neighbours, reloads."""
