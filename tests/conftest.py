"Shared by all tests."
import os

import vllm_mlx  # noqa: F401  (before mlx.core, so that its matrix products go through OpenBLAS)
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)   # the same examples on every run
if os.environ.get("CI"): settings.load_profile("ci")
