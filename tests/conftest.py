"Shared by all tests."
import vllm_mlx  # noqa: F401  (before mlx.core, so that its matrix products go through OpenBLAS)
