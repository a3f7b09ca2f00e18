"""Where a result comes from: file hashes, commit, package versions, processor, threads.

Standard library alone: reproduce.sh asks for the number of cores before anything else starts.
"""

import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
# the packages that can change a number or a picture; requirements.lock pins the rest
PACKAGES = ("numpy", "numba", "llvmlite", "torch", "pandas", "matplotlib", "papermill", "nbclient", "ipykernel")


def hash_file(path) -> str:
    """SHA-256 of a file's bytes. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def usable_cores() -> int:
    """Cores this process may keep busy: its affinity mask, cut by the cgroup's CPU quota (containers)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for quota, period in (_cgroup2(), _cgroup1()):
        if quota > 0 and period > 0:
            cores = min(cores, max(1, quota // period))
    return cores


def commit(root: Path) -> dict:
    """The commit of the repository at root, and whether its sources (all but figures/) differ from it. "unknown" where
    there is no git, or root lies inside some other repository."""
    top = _git(root, "rev-parse", "--show-toplevel")
    head = _git(root, "rev-parse", "HEAD")
    if top is None or head is None or Path(top).resolve() != root.resolve():
        return {"commit": "unknown", "dirty": None}
    return {"commit": head, "dirty": bool(_git(root, "status", "--porcelain", "--", ".", ":(exclude)figures"))}


def environment() -> dict:
    """Python, packages, system, processor and threads of this process and of the kernels it starts."""
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "system": platform.platform(),
        "processor": _processor(),
        "usable_cores": usable_cores(),
        "threads": {name: os.environ.get(name, "unset") for name in THREAD_VARIABLES},
    }


def _cgroup2():
    quota, _, period = _text("/sys/fs/cgroup/cpu.max").partition(" ")
    return _integer(quota), _integer(period)


def _cgroup1():
    return tuple(_integer(_text(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us")) for name in ("quota", "period"))


def _text(path):
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _integer(text):
    """0 for "max", -1 (no quota) and a file that is not there."""
    return int(text) if text.strip().isdigit() else 0


def _git(root, *arguments):
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def _processor():
    names = [line.partition(":")[2].strip() for line in _text("/proc/cpuinfo").splitlines()
             if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
