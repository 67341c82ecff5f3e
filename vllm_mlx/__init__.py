"""Long prompts and long answers made fast on MLX, taught in notebooks that are the source."""
__version__ = "0.1.0"

# MLX binds its BLAS when it is imported, so this comes before any module that imports it.
from .blas import load_openblas

load_openblas()
