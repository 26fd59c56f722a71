"""Run the demo until it has trained for a while, and take pictures of its dashboard.

A viewer's join line is made as an operator would make it; the browser is that of tests/web.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from asyncgrpo_agent.core.join import decode
from asyncgrpo_agent.core.progress import Progress
from asyncgrpo_agent.store import history, identity

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PATIENCE_S = 900.0
RUN = "demo"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/screenshots", description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "packaging" / "docs")
    parser.add_argument("--step", type=int, default=30, help="when (%(default)s)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="asyncgrpo-screenshots-"))
    with (
        (folder / "demo.log").open("wb") as log,
        subprocess.Popen(_demo(folder), cwd=ROOT, stdout=log, stderr=log) as demo,
    ):
        try:
            _wait_for_step(demo, folder, options.step)
            _take(folder, options.folder)
        finally:
            demo.send_signal(signal.SIGTERM)
    shutil.rmtree(folder)
    return 0


def _demo(folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "asyncgrpo_agent", "--role=local"),
        f"--config={HERE / 'demo.toml'}",
        f"--state-dir={folder}",
        f"--engine-python={ROOT / '.engine' / 'bin' / 'python'}",
        "--replicas=2",
        "--set=trainer.sample_rollouts=240",
    ]


def _wait_for_step(demo: subprocess.Popen[bytes], folder: Path, step: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while demo.poll() is None and time.monotonic() < deadline:
        run = Progress()
        for path in folder.glob("trainer/trainer/*/history.jsonl"):
            for record in history.read(path):
                run.add(record)
        if run.steps and run.steps[-1].step >= step:
            return
        time.sleep(1.0)
    raise SystemExit(f"the demo did not come to step {step}: see {folder}")


def _take(folder: Path, target: Path) -> None:
    (address,) = decode((folder / "replica.join").read_text().strip()).addresses
    line = identity.create_join(
        folder / "proxy",
        role="viewer",
        run=RUN,
        addresses=[address],
        now_unix_s=time.time(),
        rollouts=True,
    )
    (folder / "viewer.join").write_text(line + "\n")
    node, chromium = shutil.which("node"), shutil.which("chromium")
    if node is None or chromium is None:
        raise SystemExit("node or chromium is missing")
    words = [chromium, f"https://{address}/", str(folder), str(folder / "viewer.join")]
    subprocess.run([node, str(HERE / "screenshots.mjs"), *words], check=True)
    target.mkdir(parents=True, exist_ok=True)
    for scheme in ("light", "dark", "phone"):
        name = f"dashboard-{scheme}.png"
        python = str(ROOT / ".engine" / "bin" / "python")
        subprocess.run([python, "-c", _SMALLER, str(folder / name), str(target / name)], check=True)
        print(f"{target / name}: {(target / name).stat().st_size / 1e3:.0f} kB")


_SMALLER = """
import sys
from PIL import Image
Image.open(sys.argv[1]).convert("RGB").quantize(128).save(sys.argv[2], optimize=True)
"""


if __name__ == "__main__":
    raise SystemExit(main())
