"""Types that several losses share. B rows, D dimensions, N hard negatives of each row."""

from jaxtyping import Array, Float32, Int32

Vectors = Float32[Array, "B D"]
Negatives = Float32[Array, "B N D"]
# Halves of 64-bit hashes of ids; equal keys mark duplicates.
Keys = Int32[Array, "B 2"]
NegativeKeys = Int32[Array, "B N 2"]
AllKeys = tuple[Keys | None, Keys | None, NegativeKeys | None]  # keys of queries, passages, hard negatives
Scalar = Float32[Array, ""]
Metrics = dict[str, Scalar]
