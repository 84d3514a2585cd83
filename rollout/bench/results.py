"""The results of a benchmark: one JSON file with the machine it ran on, a picture beside it, and a table to look at."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table

from moebius.rollout.errors import BadInput
from moebius.rollout.report import installed_versions


class Curve(BaseModel):
    """A line of the picture, or a group of bars; `low` and `high` are the ends of the spread around `y`."""

    model_config = ConfigDict(extra="forbid")

    name: str
    x: list[float | str]
    y: list[float]
    low: list[float] = Field(default_factory=list)
    high: list[float] = Field(default_factory=list)


class Picture(BaseModel):
    """How the curves are drawn."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["lines", "bars", "stack", "time"] = "lines"  # time: lines over an axis that is not logarithmic
    title: str
    x_label: str = ""
    y_label: str
    log_y: bool = False
    marks: dict[str, list[float]] = Field(default_factory=dict, description="time: vertical lines at x, by name.")
    spans: dict[str, list[tuple[float, float]]] = Field(default_factory=dict, description="time: shaded, from x to x.")


class Panel(BaseModel):
    """A further picture beside the first, with curves of its own."""

    model_config = ConfigDict(extra="forbid")

    picture: Picture
    curves: list[Curve]


class Results(BaseModel):
    """One benchmark. `results` is flat: name to number, units in the names (`_s`, `_ms`, `_pct`, `_gib`)."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    benchmark: str
    command: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    options: dict[str, Any]
    results: dict[str, float]
    curves: list[Curve] = Field(default_factory=list)
    picture: Picture | None = None
    panels: list[Panel] = Field(default_factory=list)
    series: dict[str, Any] = Field(default_factory=dict, description="Measurements behind the numbers.")
    notes: list[str] = Field(default_factory=list)

    def write(self, folder: Path) -> Path:
        """Write `<benchmark>.json`, and `<benchmark>.png` where there is a picture; returns the JSON's path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.benchmark}.json"
        path.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        if self.picture is not None:
            from moebius.rollout.bench.plots import draw

            draw(self, path.with_suffix(".png"))
        return path

    def show(self, console: Console) -> None:
        """Print the numbers as a table, then the notes."""
        table = Table(title=f"bench {self.benchmark}", title_justify="left")
        table.add_column("result")
        table.add_column("value", justify="right")
        for name, value in self.results.items():
            table.add_row(name, f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}")
        console.print(table)
        for note in self.notes:
            console.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False)


def make_results(benchmark: str, *, command: str, options: dict[str, Any], **parts: Any) -> Results:
    """Results with the machine, the versions and the time filled in."""
    return Results(
        benchmark=benchmark,
        command=command,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(),
        versions=versions(),
        options=options,
        **parts,
    )


def read_results(path: Path) -> Results:
    """A benchmark's results. Raises BadInput when the file holds none."""
    try:
        return Results.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: not the results of a benchmark: {error}") from error


def portable(results: Results) -> Results:
    """The same with absolute paths of this host cut to their names."""
    return Results.model_validate(_portable(results.model_dump(mode="json")))


def publish(source: Path, target: Path) -> Path:
    """Write results again as `target` (with the picture beside it), absolute paths of this host cut to their names.

    Raises BadInput when `source` holds no results.
    """
    results = portable(read_results(source))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(results.model_dump_json(indent=1) + "\n", encoding="utf-8")
    if results.picture is not None:
        from moebius.rollout.bench.plots import draw

        draw(results, target.with_suffix(".png"))
    return target


def _portable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _portable(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_portable(part) for part in value]
    return re.sub(r"(?<![\w./])/(?:[\w.+-]+/)*([\w.+-]+)", r"\1", value) if isinstance(value, str) else value


def machine() -> dict[str, Any]:
    """Names and number of GPUs, driver, CPU and memory of this host."""
    gpus = _nvidia_smi("name", "driver_version")
    return {
        "gpus": [name for name, _ in gpus],
        "gpu_count": len(gpus),
        "driver": gpus[0][1] if gpus else None,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    """Versions of this package, vLLM, torch, triton, Python and of the CUDA that torch is built for."""
    found = installed_versions()
    found["moebius"] = found.pop("moebius-rollout", "not installed")
    try:
        found["triton"] = metadata.version("triton")
    except metadata.PackageNotFoundError:
        found["triton"] = "not installed"
    import torch

    found["cuda"] = torch.version.cuda or "none"
    return {name: found[name] for name in ("moebius", "vllm", "torch", "triton", "python", "cuda") if name in found}


def gpu_memory_used() -> list[float]:
    """GiB in use on each GPU of this host, by the driver; empty where there is no nvidia-smi."""
    return [float(mib) / 1024 for (mib,) in _nvidia_smi("memory.used")]


def _nvidia_smi(*fields: str) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    return [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1] if match else platform.machine()
