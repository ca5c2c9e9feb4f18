"""What a step costs: what its compiled program does, and how quick chips are."""
