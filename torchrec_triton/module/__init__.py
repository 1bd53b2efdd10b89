"""The operator (tbe.py) and the TorchRec classes that reach it (sharding.py, compute_kernel.py)."""
