"""One training program, run with two compute kernels side by side: `torchrec-triton train` and `torchrec-triton ab`."""
