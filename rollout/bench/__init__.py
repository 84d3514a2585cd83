"""Benchmarks beside stock vLLM: the `moebius bench` commands. Importing this loads neither torch nor vLLM."""
