"""The driver's side of runs that are played elsewhere: what is stored of them, and the files that travel.

Needs neither torch nor Ray: the actor that a `Desk` is does nothing but read and write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import hold, lock, write_bytes

ROWS = "rounds.jsonl"

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """What has become of a file: its content from byte `at` on; None: it is gone."""

    name: str
    content: bytes | None
    at: int = 0


def stamps(folder: Path) -> dict[str, tuple[int, int, int]]:
    """The files of a run -> size, time and inode, one of which a change of the file changes."""
    found = {p.relative_to(folder).as_posix(): p.stat() for p in sorted(folder.rglob("*")) if p.is_file()}
    return {name: (s.st_size, s.st_mtime_ns, s.st_ino) for name, s in found.items() if name != "lock"}


def changed(folder: Path, sent: dict[str, tuple[int, int, int]]) -> list[Change]:
    """What has changed in a run's folder since it was `sent`, which is updated: states after what they need, `done` last."""
    now = stamps(folder)
    made = []
    for name in sorted(now, key=lambda name: (name == "done", name.startswith("state/round-"))):
        if now[name] != sent.get(name):
            before = sent[name][0] if name == ROWS and name in sent else 0
            at = before if now[name][0] >= before else 0  # rows are added at the end
            made.append(Change(name, (folder / name).read_bytes()[at:], at))
    made += [Change(name, None) for name in sent if name not in now]
    sent.clear()
    sent.update(now)
    return made


def write(folder: Path, changes: Sequence[Change]) -> None:
    """Make changes in a folder."""
    for change in changes:
        path = folder / change.name
        if change.content is None:
            path.unlink(missing_ok=True)
        elif change.at:
            with open(path, "r+b") as file:
                file.truncate(change.at)
                file.seek(change.at)
                file.write(change.content)
        else:
            write_bytes(path, change.content)


class Desk:
    """An actor beside the driver: gives tasks what is stored of their runs, stores what they send, keeps it for the driver
    to show."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = [Path(folder) for folder in folders]
        self.locks = [lock(folder) for folder in self.folders]
        self.turns = [0] * len(folders)
        self.told: list[tuple[int, Event]] = []

    def begin(self, number: int) -> tuple[int, dict[str, bytes]]:
        """The files of a run, which is locked for as long as the desk stands, and which turn at it this is."""
        folder = self.folders[number]
        if not self.turns[number]:
            hold(folder, self.locks[number])
        self.turns[number] += 1
        return self.turns[number], {name: (folder / name).read_bytes() for name in stamps(folder)}

    def store(self, number: int, turn: int, changes: Sequence[Change], event: Event | None) -> None:
        """Make the changes in the run's folder, in their order."""
        if turn != self.turns[number]:  # of a node that was given up and came back
            raise RuntimeError("this run is played elsewhere by now")
        write(self.folders[number], changes)
        if event is not None:
            self.told.append((number, event))

    def news(self) -> list[tuple[int, Event]]:
        """What was told since this was asked last."""
        told, self.told = self.told, []
        return told

    def close(self) -> None:
        """Give the folders back; nothing is stored from now on."""
        self.turns = [-1] * len(self.turns)
        for held in self.locks:
            held.release()
