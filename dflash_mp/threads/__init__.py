"""Drafters as threads of one process: the mode that this project replaces, kept to compare. Nothing else imports this package."""
