"""Every kind of index, and what is done to them: opening, tuning, updating."""
