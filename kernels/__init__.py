"""Bytes in motion: copy plans, movers and sampling noise. Knows nothing of vLLM, the engine or the service."""

# With the repository root on sys.path (a working directory, `ray job submit --working-dir .`), this folder is also
# found as `kernels`, the name of a package on PyPI. transformers' is_kernels_available() then reads a version from here
# and parses "N/A" if there is none, which raises InvalidVersion. A version below any it accepts makes it answer False.
__version__ = "0"
