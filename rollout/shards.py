"""Results of a job on disk: one Parquet file per finished step, whole or not there, and what the job was.

A step is finished exactly when its file step_NNNN.parquet is there; it is written under another name and renamed last.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from moebius.rollout.deepmath import StepPrompt
from moebius.rollout.errors import BadInput
from moebius.rollout.types import Rollout

SCHEMA_VERSION = 1
_KEY = b"moebius"
_SHARD = re.compile(r"step_(\d{4,})\.parquet")
_log = logging.getLogger(__name__)


def shard_schema() -> Any:
    """Columns of a shard; one row per sample, ordered by prompt_index and sample_index."""
    import pyarrow as pa

    ids, text = pa.list_(pa.int32()), pa.string()
    return pa.schema(
        {
            "step": pa.int64(),
            "prompt_index": pa.int32(),  # in the step
            "sample_index": pa.int32(),
            "question_index": pa.int64(),  # in the data source
            "question": text,  # JSON of the messages where the source has messages
            "answer": text,
            "meta": text,  # JSON
            "prompt_token_ids": ids,
            "token_ids": ids,
            "logprobs": pa.list_(pa.float32()),  # of the sampled tokens, natural logarithm; null if not asked for
            "top_logprobs": pa.list_(pa.map_(pa.int32(), pa.float32())),
            "text": text,  # null without a tokenizer
            "finish_reason": text,
            "stop_reason": text,  # token id or text; null for end-of-sequence
            "policy_version": pa.int64(),  # that the last token was sampled under
            # Runs of tokens sampled under one version, in their order; null in shards written before it was recorded.
            "versions": pa.list_(pa.struct({"policy_version": pa.int64(), "tokens": pa.int32()})),
            # Runs of tokens drawn in one layout ("EP", "TP"), likewise.
            "layouts": pa.list_(pa.struct({"layout": text, "tokens": pa.int32()})),
            "rank": pa.int32(),
            "reward": pa.float64(),  # null without a scorer, or where it failed
        }
    )


def shard_rows(
    step: int,
    prompts: Sequence[StepPrompt],
    rollouts: Sequence[Rollout],
    rewards: Sequence[float | None] | None = None,
) -> list[dict[str, Any]]:
    """Rows of a step's shard. `rewards` go by prompt and sample; None: no scorer."""
    rows: list[dict[str, Any]] = []
    for rollout in rollouts:
        prompt = prompts[rollout.prompt_index]
        question = prompt.question.prompt
        shared = {
            "step": step,
            "prompt_index": rollout.prompt_index,
            "question_index": prompt.index,
            "question": question if isinstance(question, str) else json.dumps(question, ensure_ascii=False),
            "answer": prompt.question.answer,
            "meta": json.dumps(prompt.question.meta, ensure_ascii=False, default=str),
            "prompt_token_ids": rollout.prompt_token_ids,
        }
        for s in rollout.samples:
            own = {
                "sample_index": s.sample_index,
                "token_ids": s.token_ids,
                "logprobs": s.logprobs,
                "top_logprobs": None if s.top_logprobs is None else [list(top.items()) for top in s.top_logprobs],
                "text": s.text,
                "finish_reason": s.finish_reason,
                "stop_reason": None if s.stop_reason is None else str(s.stop_reason),
                "policy_version": s.policy_version,
                "versions": [{"policy_version": version, "tokens": count} for version, count in s.versions],
                "layouts": [{"layout": layout, "tokens": count} for layout, count in s.layouts],
                "rank": s.rank,
                "reward": None if rewards is None else rewards[len(rows)],
            }
            rows.append(shared | own)
    return rows


def write_shard(folder: str | Path, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write step_NNNN.parquet into `folder`, replacing one that is there; returns its path."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = shard_path(folder, step)
    about = {"schema_version": SCHEMA_VERSION, "step": step, "rows": len(rows)}
    table = pa.Table.from_pylist(list(rows), schema=shard_schema().with_metadata({_KEY: json.dumps(about)}))
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as file:
            pq.write_table(table, file, compression="zstd")
            file.flush()
            # The rename must not become durable before the data: after a power cut the file would be there, torn.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def shard_path(folder: str | Path, step: int) -> Path:
    """Where the shard of a step is."""
    return Path(folder) / f"step_{step:04d}.parquet"


def read_shard(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a shard; None for columns that it was written without.

    Raises BadInput when it is missing, broken, or of another schema version.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    fault = shard_fault(path)
    if fault is not None:
        raise BadInput(f"{path}: {fault}")
    try:
        rows = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error
    columns = dict.fromkeys(shard_schema().names)
    return [columns | row for row in rows]


def shard_fault(path: str | Path, step: int | None = None, rows: int | None = None) -> str | None:
    """What is wrong with a shard, by its footer: nothing (None), or words. Checks step and rows where given."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not Path(path).is_file():
        return "there is no such file"
    try:
        with pq.ParquetFile(path) as file:
            metadata, count = file.schema_arrow.metadata or {}, file.metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        return f"not a readable parquet file: {error}"
    if _KEY not in metadata:
        return "not a shard of a rollout job"
    about = json.loads(metadata[_KEY])
    if about["schema_version"] != SCHEMA_VERSION:
        return f"schema_version {about['schema_version']}, this version reads {SCHEMA_VERSION}"
    if count != about["rows"] or (rows is not None and count != rows):
        return f"holds {count} samples, expected {about['rows'] if rows is None else rows}"
    return None if step is None or about["step"] == step else f"holds step {about['step']}, expected {step}"


@dataclass
class JobFolder:
    """The folder of one job; a context manager that keeps a second job out."""

    path: Path
    _lock: int | None = None

    def __enter__(self) -> JobFolder:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _open_lock(self.path / ".lock")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = (self.path / ".lock").read_text(encoding="utf-8").strip()
            os.close(self._lock)
            self._lock = None
            raise BadInput(
                f"{self.path}: another job ({owner}) writes to this folder; wait for it, stop it (ray job "
                "list, ray job stop ID), or give another job.out"
            ) from None
        os.ftruncate(self._lock, 0)
        os.write(self._lock, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._lock is not None:
            os.close(self._lock)  # and with it the lock; a killed job's lock goes with its process
            self._lock = None

    def claim(self, settings: Mapping[str, Any]) -> None:
        """Note what the job is (job.json), or check that the folder's job is this one.

        Raises BadInput naming the settings that differ: steps of one folder must belong together.
        """
        path = self.path / "job.json"
        text = json.dumps({"schema_version": SCHEMA_VERSION, **settings}, indent=1, ensure_ascii=False) + "\n"
        if path.exists():
            try:
                before = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise BadInput(f"{path}: cannot be read ({error}); give another job.out, or --fresh") from error
            changed = differences(before, json.loads(text))
            if changed:
                listed = "".join(f"\n  {line}" for line in changed[:10])
                raise BadInput(
                    f"{self.path} holds a job with other settings:{listed}\n"
                    "  give another job.out, or --fresh to remove what is there"
                )
            return
        stray = [p.name for p in self._results()]
        if stray:
            raise BadInput(
                f"{self.path} holds results of something else ({', '.join(sorted(stray)[:3])}); give another job.out, "
                "or --fresh to remove them"
            )
        temporary = self.path / f".job.json.{os.getpid()}.tmp"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)

    def clear(self) -> None:
        """Remove the results of an earlier job."""
        for path in [*self._results(), self.path / "job.json"]:
            path.unlink(missing_ok=True)

    def unfinished(self, steps: int, rows: int) -> list[int]:
        """Steps below `steps` without a whole shard of `rows` samples."""
        left = []
        for step in range(steps):
            path = shard_path(self.path, step)
            fault = shard_fault(path, step, rows)
            if fault is not None:
                left.append(step)
                if path.exists():
                    _log.warning("%s: %s; the step is done again", path, fault)
        return left

    def _results(self) -> list[Path]:
        patterns = ("step_*.parquet", "step_*.json", "report.html", "rollouts.jsonl")
        leftovers = list(self.path.glob(".step_*.tmp"))
        return [p for pattern in patterns for p in self.path.glob(pattern)] + leftovers


def _open_lock(path: Path) -> int:
    """Not through a link: what it leads to, maybe outside the folder, would be overwritten."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BadInput(f"{path}: is a link, and a job writes only into its own folder; remove it") from error
        raise


def finished_steps(folder: str | Path) -> list[int]:
    """Steps that have a shard in `folder`, in order."""
    found = (_SHARD.fullmatch(path.name) for path in Path(folder).glob("step_*.parquet"))
    return sorted(int(match[1]) for match in found if match)


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Lines "key: before -> now" for the leaves in which two nested mappings differ."""
    lines: list[str] = []
    for key in _keys(before, now):
        a, b = before.get(key), now.get(key)
        name = f"{prefix}{key}"
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += differences(a, b, f"{name}.")
        elif a != b:
            lines.append(f"{name}: {json.dumps(a, default=str)} -> {json.dumps(b, default=str)}")
    return lines


def _keys(a: Iterable[str], b: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*a, *b]))
