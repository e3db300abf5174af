"""Fails, with a way out, unless the installed torch is the pinned CPU build.

usage: check_torch.py REQUIRED_VERSION

A CUDA build brings several gigabytes of packages that the tests do not use, and other kernels than
those the golden files were made with.
"""

import sys
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns when numpy is not installed yet
    import torch


def main(required_version: str) -> int:
    """Returns the exit status: 0 when torch has the required version and no CUDA."""
    problems = []
    if torch.__version__.split("+")[0] != required_version:
        problems.append(f"torch is {torch.__version__}, expected {required_version}")
    if torch.version.cuda is not None:
        problems.append(f"torch is a build for CUDA {torch.version.cuda}, expected a CPU build")
    for problem in problems:
        print(f"waypost: {problem}", file=sys.stderr)
    if problems:
        print(
            f"waypost: install a CPU build of torch {required_version} in {sys.prefix} by\n"
            f"    {sys.executable} -m pip install --force-reinstall PATH/TO/torch-CPU.whl\n"
            "and run make again; or accept this build: make TORCH_BUILD=any ...",
            file=sys.stderr,
        )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
