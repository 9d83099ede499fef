"""WGSL kernels: their description (kernel.py), their text (templates/, render.py)."""
