"""Questions answered from retrieved passages: their passages, tokens and answers."""
