"""Model cards: a shared template, and each method's own text."""
