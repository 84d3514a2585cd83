"""What this rank is doing, told to whoever wants to know: errors name it, and tests act on it.

A rank is a process, so there is one list of observers per process. They are called on the engine's thread, at the start
of each phase and once per forward pass, and must be quick.
"""

from __future__ import annotations

from collections.abc import Callable

Observer = Callable[[str], None]

IDLE = "idle"
START = "start-up"
ADMISSION = "admission"
PREFILL = "prefill"
UPDATE = "weight update"
SLEEP, WAKE = "sleep", "wake-up"

# In order, by the layout that the switch goes to; see moebius.engine.switch.
SWITCH_PHASES = {
    "TP": ("drain", "quiesce", "decide", "reshard", "export", "gather", "import", "kv", "wait", "activate"),
    "EP": ("drain", "quiesce", "decide", "reshard", "export", "import", "front", "kv", "wait", "activate"),
}

observers: list[Observer] = []


def enter(phase: str) -> None:
    """Tell all observers that `phase` begins."""
    for observer in observers:
        observer(phase)


def decode(layout: str) -> str:
    """Name of decoding in "EP" or "TP"."""
    return f"decode in {layout}"


def switch(to: str, phase: str) -> str:
    """Name of a phase of the switch to "EP" or "TP"."""
    return f"switch to {to}, phase {phase}"


def own_requests_only(phase: str) -> bool:
    """Whether a rank in this phase has no requests but those it answers for."""
    return phase in (ADMISSION, PREFILL, decode("EP"))
