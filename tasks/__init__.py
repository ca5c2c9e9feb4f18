"""Functions that register SeqIO tasks over published data sets and your files; import as `jaxir.tasks`."""
