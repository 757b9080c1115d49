"""Shared memory of the stack's processes: which segments are theirs, and removing what a hard kill left.

Names alone do not tell whose a segment is, so segments are noted while our processes map or hold them, with
their inode; a noted segment is removed only when it is still that inode and no process at all maps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

_ROOT = Path("/dev/shm")


def family(pids: Iterable[int]) -> set[int]:
    """``pids`` and all their descendants that are alive."""
    found: set[int] = set()
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            found.add(pid)
            found.update(child.pid for child in process.children(recursive=True))
    return found


def _inodes_used(pid: int) -> set[int]:
    """Inodes in /dev/shm that process ``pid`` maps or holds open.

    By inode, because a POSIX semaphore is mapped under the temporary name it was created with.
    """
    used: set[int] = set()
    proc = Path("/proc") / str(pid)
    with suppress(OSError):
        for line in (proc / "maps").read_text(errors="replace").splitlines():
            if "/dev/shm/" in line:
                used.add(int(line.split()[4]))
    with suppress(OSError):
        for entry in (proc / "fd").iterdir():
            with suppress(OSError):
                if str(entry.readlink()).startswith("/dev/shm/"):
                    used.add(entry.stat().st_ino)
    return used


def segments_of(pids: Iterable[int]) -> dict[str, int]:
    """Segments (name → inode) that ``pids`` or their descendants use now."""
    used: set[int] = set()
    for pid in family(pids):
        used |= _inodes_used(pid)
    return {name: inode for name, inode in _present().items() if inode in used}


def remove_orphans(noted: Mapping[str, int]) -> list[str]:
    """Remove those of the ``noted`` segments that nobody uses any more; returns their names."""
    present = _present()
    ours = {name for name, inode in noted.items() if present.get(name) == inode}
    if not ours:
        return []
    in_use: set[int] = set()
    for pid in psutil.pids():
        in_use |= _inodes_used(pid)
    removed = []
    for name in sorted(ours):
        if noted[name] not in in_use:
            with suppress(OSError):
                (_ROOT / name).unlink()
                removed.append(name)
    return removed


def _present() -> dict[str, int]:
    found = {}
    with suppress(OSError):
        for entry in _ROOT.iterdir():
            with suppress(OSError):
                found[entry.name] = entry.stat().st_ino
    return found
