"""Benchmarks against FBGEMM's CUDA kernels. `python -m torchrec_triton.bench.run --help`."""
