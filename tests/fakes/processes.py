"""What the kernel says of a process, whoever started it."""

from __future__ import annotations

from pathlib import Path


def runs(pid: int) -> bool:
    """Whether it has not ended; dead ones that nobody has reaped have."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def peak_rss_mib(pid: int) -> float:
    return _memory_mib(pid, "VmHWM:")


def rss_mib(pid: int) -> float:
    return _memory_mib(pid, "VmRSS:")


def _memory_mib(pid: int, row: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(row)[2].split()[0]) / 1024


def open_files(pid: int) -> int:
    """The number of its file descriptors."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def children_naming(pid: int, text: str) -> list[int]:
    """Its children whose command line contains `text`."""
    listed = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    lines = {int(child): Path(f"/proc/{child}/cmdline") for child in " ".join(listed).split()}
    return [child for child, line in lines.items() if text in line.read_text()]
