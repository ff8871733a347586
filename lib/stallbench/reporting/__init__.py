"""From recorded trials to figures, verdicts and the page."""
