"""The environment of the tests and of the commands that they start. conftest.py imports it before JAX."""

import os
from importlib.metadata import version
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".pytest_cache"
AS_USERS_COMPILE = bool(os.environ.get("JAXIR_AS_USERS_COMPILE"))  # set for the tests marked `compiled`

# Compiling takes most of the tests' time, so XLA optimises as little as it can.
QUICK_XLA_FLAGS = (
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE --xla_cpu_parallel_codegen_split_count=1"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 12):  # jaxlib 0.12 does not know the flag
    QUICK_XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"

DEFAULTS = {
    "JAX_PLATFORMS": "cpu",
    "NPROC": "16",  # threads of XLA's pool; with fewer threads than devices, collectives deadlock
    "OMP_WAIT_POLICY": "passive",  # OpenMP's threads sleep while they wait
    "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # Java starts faster
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "HF_HUB_OFFLINE": "1",
    "XDG_CACHE_HOME": str(CACHE / "xdg"),  # a cache of the tests, not the user's
}
quick = "" if AS_USERS_COMPILE else QUICK_XLA_FLAGS
FIXED = {
    "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4" + quick,
    "JAXIR_QUICK_XLA_FLAGS": quick,  # for processes with another number of devices
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "0" if AS_USERS_COMPILE else "1",
    # All processes and later runs share compiled programs.
    "JAX_COMPILATION_CACHE_DIR": str(CACHE / "programs"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.01",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    # A program that another process has written only in part is compiled again.
    "PYTHONWARNINGS": "ignore:Error reading persistent compilation cache,"
    "ignore:Error writing persistent compilation cache",
}

for name, value in DEFAULTS.items():
    os.environ.setdefault(name, value)
os.environ.update(FIXED)
