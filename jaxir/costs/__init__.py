"""The costs of a training step: its operations and traffic, read from its program, and the speed of chips."""
