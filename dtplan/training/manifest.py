"""The JSON beside the tensors: what a training checkpoint is of, and which checkpoints a folder has."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import dtplan
from dtplan._errors import WeightsError
from dtplan.planner.bound import BoundPlan

__all__ = ["MANIFEST", "Manifest", "list_checkpoints", "prune", "read_json", "step_folder", "tidy"]

MANIFEST = "manifest.json"
FORMAT = "dtplan training checkpoint"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a training checkpoint is of, and of what its files are."""

    step: int
    order: int
    """Grows with every save to the folder; the highest is the latest, also after a resume from an earlier step."""
    plan: str
    digest: str
    architecture: str
    degrees: Mapping[str, int]
    versions: Mapping[str, str]
    files: Mapping[str, int]
    """Every other file of the folder, with its bytes."""

    @classmethod
    def of(cls, bound: BoundPlan, folder: Path, *, step: int, order: int) -> Manifest:
        """The manifest of what was written to ``folder``."""
        return cls(
            step=step,
            order=order,
            plan=bound.plan,
            digest=bound.digest,
            architecture=bound.architecture,
            degrees=dict(bound.degrees),
            versions=_versions(),
            files={file.name: file.stat().st_size for file in sorted(folder.iterdir())},
        )

    def write(self, folder: Path) -> None:
        """Writes it; raises OSError."""
        said = {"format": FORMAT, "version": VERSION, **asdict(self)}
        (folder / MANIFEST).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path, *, sizes: bool) -> Manifest:
        """Reads it, and with ``sizes`` checks that every file is there and as long as it was.

        Raises:
            WeightsError: there is none, it is broken or of a later version, or a file is missing or truncated.
        """
        file = folder / MANIFEST
        if (folder / ".metadata").exists() and not file.exists():
            raise WeightsError(
                f"{folder}: is a checkpoint in the default format of torch.distributed.checkpoint, which holds "
                "pickles; dtplan reads none: load it with torch and save it with TrainingCheckpoints"
            )
        said = read_json(file)
        if not isinstance(said, dict) or said.pop("format", None) != FORMAT:
            raise WeightsError(f"{file}: is no manifest of a {FORMAT}; give the folder of TrainingCheckpoints")
        if (found := said.pop("version", None)) != VERSION:
            raise WeightsError(f"{file}: has version {found}, and this dtplan reads {VERSION}; update dtplan")
        try:
            manifest = cls(**said)
            due = dict(manifest.files) if sizes else {}
        except (TypeError, ValueError) as error:
            raise WeightsError(f"{file}: is broken ({error}); resume from another checkpoint") from error
        held = {name: (folder / name).stat().st_size if (folder / name).is_file() else 0 for name in due}
        wrong = [f"{name} ({held[name]} of {due[name]} bytes)" for name in due if held[name] != due[name]]
        if wrong:
            raise WeightsError(f"{folder}: not whole: {', '.join(wrong[:5])}; resume from another checkpoint")
        return manifest

    def differences(self, bound: BoundPlan) -> tuple[str, ...]:
        """What is not as it was when the checkpoint was saved, and need not be, in words."""
        then = {"plan": f"{self.plan} {self.digest[:12]}", **self.degrees, **self.versions}
        now = {"plan": f"{bound.plan} {bound.digest[:12]}", **bound.degrees, **_versions()}
        return tuple(f"{key}: {then.get(key)} -> {now[key]}" for key in now if then.get(key) != now[key])


def _versions() -> dict[str, str]:
    found = {"dtplan": dtplan.__version__, "python": platform.python_version()}
    for package in ("torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def read_json(file: Path) -> Any:
    """The content of a JSON file. Raises WeightsError."""
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        raise WeightsError(f"{file}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file}: broken JSON ({error}); resume from another checkpoint") from error


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path, *, broken: bool = False) -> list[tuple[int, int, Path]]:
    """``(order, step, path)`` of every checkpoint in ``folder``, the latest last.

    Raises WeightsError for a manifest that cannot be read, or passes it by if it may be ``broken``.
    """
    found = []
    for path in folder.glob("step-*") if folder.is_dir() else ():
        if not (path / MANIFEST).is_file():
            continue
        try:
            said = read_json(path / MANIFEST)
            found.append((int(said["order"]), int(said["step"]), path))
        except (WeightsError, KeyError, TypeError, ValueError) as error:
            if not broken:
                raise WeightsError(f"{path / MANIFEST}: is broken ({error}); remove {path.name}") from error
    return sorted(found)


def tidy(folder: Path) -> None:
    """Puts right what saves that were killed left: a folder that was being replaced is back, the rest is gone."""
    for path in sorted(folder.glob(".step-*")):
        name, _, kind = path.name.removeprefix(".").partition(".")
        if kind.startswith("old-") and not (folder / name).exists():
            path.rename(folder / name)
        elif kind.startswith(("old-", "tmp-")):
            shutil.rmtree(path, ignore_errors=True)


def prune(folder: Path, keep: int | None) -> None:
    """Removes all but the latest ``keep`` checkpoints; what cannot be removed now, the next save removes."""
    there = list_checkpoints(folder, broken=True)
    for _, _, path in there[:-keep] if keep else ():
        # Out of the way at once: a half-removed folder must not look like a checkpoint.
        going = path.with_name(f".{path.name}.tmp-removed")
        try:
            path.rename(going)
        except OSError:
            continue
        shutil.rmtree(going, ignore_errors=True)
