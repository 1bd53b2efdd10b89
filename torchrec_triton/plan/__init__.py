"""Planning: which tables run on Triton. Needs neither a GPU nor Triton."""
