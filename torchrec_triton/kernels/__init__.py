"""Triton kernels of the table-batched embedding and the launchers around them. `ops` is the way in."""
