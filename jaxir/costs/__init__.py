"""What a training step costs: its operations and traffic, read from its program, and the speed of chips."""
