"""Training objectives: what a batch contains, the auxiliary parameters, and the loss; one file for each."""
