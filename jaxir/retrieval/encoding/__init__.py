"""From texts to vectors: the public `DualEncoder`, its batches, and the vectors of a corpus on disk."""
