"Shared by all tests."
import os, random, socket

import vllm_mlx  # noqa: F401  (before mlx.core, so that its matrix products go through OpenBLAS)
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("repeat", derandomize=True, deadline=None)    # the same examples on every run
settings.register_profile("explore", max_examples=1000, deadline=None)  # new ones: HYPOTHESIS_PROFILE=explore pytest
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    "MLX seeds itself by the clock. Here each test begins with the same numbers, whichever ran before it; VLLM_MLX_TEST_SEED=7 pytest takes others."
    seed = int(os.environ.get("VLLM_MLX_TEST_SEED", "0"))
    random.seed(seed); np.random.seed(seed); mx.random.seed(seed)

@pytest.fixture
def ring_port():
    "A port that is free, as is the next one: one for each of two processes. From below the range in which systems take ports by themselves."
    for port in random.SystemRandom().sample(range(10_000, 30_000, 2), 50):
        with socket.socket() as one, socket.socket() as two:
            try: one.bind(("127.0.0.1", port)); two.bind(("127.0.0.1", port + 1))
            except OSError: continue
        return port
    pytest.fail("no two free ports from 10,000 to 30,000")
