"""OpenRLHF's `train_ppo_ray` with rollouts from switch groups:

    python -m moebius.rollout.integrations.openrlhf.train_ppo_ray ...

takes the options of `python -m openrlhf.cli.train_ppo_ray`, and ours, `--moebius.*`; docs/openrlhf.md.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Sequence

from moebius.rollout.errors import MoebiusError
from moebius.rollout.integrations.openrlhf.settings import refusals, refuse, split_options

COMMAND = "openrlhf.cli.train_ppo_ray"


def main(argv: Sequence[str]) -> None:
    """Run OpenRLHF's command line. Raises MoebiusError for what is not supported, before anything is started."""
    from moebius.rollout.integrations.openrlhf.install import install

    settings, others = split_options(argv)
    if not {"-h", "--help"} & set(others):
        refuse(refusals(others))
    install(settings)
    try:
        importlib.import_module("openrlhf.trainer.ray.ppo_actor")  # needs the most
    except ModuleNotFoundError as error:
        raise MoebiusError(
            f"OpenRLHF needs {error.name}, which is not installed here; docs/openrlhf.md says how to install it"
        ) from error
    sys.argv = [COMMAND, *others]
    runpy.run_module(COMMAND, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except MoebiusError as error:
        sys.exit(f"error: {error}")
