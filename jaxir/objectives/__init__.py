"""Training methods: which batch each needs, and how models and losses make a loss of it."""
