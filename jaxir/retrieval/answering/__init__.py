"""Questions answered from what was retrieved for them: their passages, tokens and answers."""
