"""One run: from the user's request to a finished run folder."""
