"""SeqIO tasks over published data sets and files of one's own; imported as `jaxir.tasks`."""
