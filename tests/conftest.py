"""What every test runs on: 20 emulated CPU devices, threads enough for them, and compiled programs kept between runs.

JAX reads all of it once, when the first array is made, so it is said here and nowhere else.
"""

import os

# A program with a collective holds a thread for each device until the last device arrives. With as many threads as
# devices, two programs in flight can starve each other for ever; 64 threads carry any number of queued programs over
# 20 devices. The thread pool takes its size from this variable, in the processes that tests start too.
os.environ["NPROC"] = "64"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Programs of tests are tiny and many: most of their time is that of the compiler, which this cuts to a third.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)

import hypothesis
import jax
import pytest

NUM_DEVICES = 20

hypothesis.settings.register_profile("dynajax", derandomize=True, deadline=None, database=None, print_blob=True)
hypothesis.settings.load_profile("dynajax")


def pytest_configure(config: pytest.Config) -> None:
    """Emulate the devices, and share one folder of compiled programs between all test processes and runs."""
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    assert config.cache is not None
    options = {
        "jax_compilation_cache_dir": str(config.cache.mkdir("xla")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in options.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
