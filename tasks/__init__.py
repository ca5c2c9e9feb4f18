"""SeqIO tasks over published data sets and the user's files; imported as `jaxir.tasks`."""
