"Shared by all tests."
import os

import vllm_mlx  # noqa: F401  (before mlx.core, so that its matrix products go through OpenBLAS)
from hypothesis import settings

settings.register_profile("repeat", derandomize=True, deadline=None)    # the same examples on every run
settings.register_profile("explore", max_examples=1000, deadline=None)  # new ones: HYPOTHESIS_PROFILE=explore pytest
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))
