from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from asyncgrpo_agent import cli
from asyncgrpo_agent.core.commits import RESULTS
from asyncgrpo_agent.core.join import Join, encode
from asyncgrpo_agent.roles.trainer_job import history_file
from asyncgrpo_agent.store import identity
from asyncgrpo_agent.store.history import History
from fakes.adapters import CONFIG, WEIGHTS, write_adapter
from fakes.bucket import ATTEMPT, PUBLIC_KEY, FakeTrainer

NEXT = "a0002-0000"
OTHER_KEY = bytes(32)
OTHER_PUBLIC = Ed25519PrivateKey.from_private_bytes(OTHER_KEY).public_key().public_bytes_raw()


@dataclass
class Host:
    """A host with a bucket, of which a run has published something, and nothing else."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    def __post_init__(self) -> None:
        (self.folder / "bucket").mkdir()
        self.state = self.folder / "state"
        self.home = self.folder / "home"

    def trainer(self, run: str = "demo", attempt: str = ATTEMPT) -> FakeTrainer:
        return FakeTrainer(self.folder / run / attempt, self.folder / "bucket" / run, attempt)

    def knows_the_key(self, public_key: bytes = PUBLIC_KEY) -> None:
        identity.add_run(self.state, "demo", public_key)

    def join(self, run: str = "demo", public_key: bytes = PUBLIC_KEY) -> Path:
        line = encode(
            Join(
                addresses=("a:1",),
                ca_der=b"",
                token="t",
                role="replica",
                run=run,
                run_public_key=public_key,
            )
        )
        path = self.folder / f"{run}.join"
        path.write_text(line)
        return path

    def history(self, *records: dict[str, Any]) -> None:
        with History(history_file(self.state, "demo")) as file:
            for number, record in enumerate(records):
                fields = {key: value for key, value in record.items() if key != "kind"}
                file.record(record["kind"], 1.7e9 + number, **fields)

    def call(self, *words: str) -> tuple[int, str, str]:
        self.capsys.readouterr()
        code = cli.main(["adapters", *words, "--bucket", "bucket", "--state-dir", "state"])
        shown = self.capsys.readouterr()
        return code, shown.out, shown.err

    def rows(self, *words: str) -> list[dict[str, Any]]:
        code, out, err = self.call(*words, "--json")
        assert code == 0, err
        found: list[dict[str, Any]] = json.loads(out)
        return found


@pytest.fixture
def host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Host:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ASYNCGRPO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("asyncgrpo_agent.logs.set_up", lambda **_options: None)
    return Host(tmp_path, capsys)


def published(adapter: str, *live: str, seconds: float = 0.5) -> dict[str, Any]:
    record = {"kind": "published", "adapter": adapter, "live": [*live, adapter]}
    return record | {"uploaded_s": 0.25, "announced_s": 0.3, "seconds": seconds}


# --- list ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_versions_of_all_attempts_newest_last(host: Host) -> None:
    host.knows_the_key()
    first, second = host.trainer(), host.trainer(attempt=NEXT)
    old = [first.publish(version).adapter for version in (0, 1)]
    new = second.publish(0).adapter
    rows = host.rows()
    assert [(row["attempt"], row["version"]) for row in rows] == [
        (ATTEMPT, 0),
        (ATTEMPT, 1),
        (NEXT, 0),
    ]
    assert [row["adapter"] for row in rows] == [one.name for one in (*old, new)]
    assert [row["live"] for row in rows] == [False, False, True]
    row = rows[0]
    assert (row["run"], row["digest"]) == ("demo", old[0].digest[:12])
    assert row["created"] == "2023-11-14T22:13:20Z"
    assert row["size_bytes"] == sum(
        (first.folder / "v0" / name).stat().st_size for name in (CONFIG, WEIGHTS)
    )
    assert (row["signature"], row["held_by"], row["acked_s"]) == ("verified", None, None)
    assert [row["version"] for row in host.rows("demo", "--limit", "2")] == [1, 0]


def test_the_table(host: Host) -> None:
    first = host.trainer().publish(7).adapter
    code, out, err = host.call()
    assert (code, err) == (0, "")
    header, row, *notes = out.splitlines()
    assert header.split()[:6] == ["attempt", "version", "digest", "size", "created", "signature"]
    assert header.split()[-5:] == ["visible", "copied", "verified", "loaded", "acked"]
    cells = row.split()
    assert cells[:5] == [ATTEMPT, "7", first.digest[:12], "4.5", "kB"]
    assert cells[5:8] == ["2023-11-14T22:13:20Z", "unverified", "yes"]
    assert cells[8:] == ["-"] * 9
    assert notes == [
        "unverified: no join and no key of run demo is on this host",
        "who holds them, and the times, are known on the trainer's host",
    ]


@pytest.mark.slow
def test_holders_and_times_on_the_trainers_host(host: Host) -> None:
    host.knows_the_key()
    first, second = (host.trainer().publish(v).adapter.name for v in (0, 1))
    phases_s = {"visible": 0.1, "staged": 0.4, "check": 0.1, "sync": 0.1, "total": 0.5}
    ack = {"kind": "ack", "adapter": first, "ok": True, "reason": ""}
    host.history(
        {"kind": "started", "attempt": ATTEMPT},
        published(first),
        ack | {"replica": "r1", "phases_s": phases_s | {"acked": 0.5}},
        ack | {"replica": "r2", "phases_s": phases_s | {"acked": 0.6}},
        {"kind": "holds", "replica": "r2", "loaded": [first]},
        {"kind": "holds", "replica": "r1", "loaded": [first]},
        published(second, first),
        {"kind": "retired", "names": [first], "live": [second]},
    )
    row, last = host.rows()
    assert (row["live"], row["held_by"], last["live"], last["held_by"]) == (
        False,
        ["r1", "r2"],
        True,
        [],
    )
    assert row["saved"] == "2023-11-14T22:13:20.500Z"
    assert (row["uploaded_s"], row["announced_s"]) == (0.25, 0.3)
    times = [row[f"{name}_s"] for name in ("visible", "copied", "verified", "loaded", "acked")]
    assert times == [2.0, 2.1, 2.3, 2.4, 2.5]  # of r2, which was later
    assert [(one["name"], one["acked_s"]) for one in row["replicas"]] == [("r1", 1.5), ("r2", 2.5)]
    assert last["replicas"] == []
    table = host.call()[1].splitlines()
    assert len(table) == 3
    assert "no    r1,r2    22:13:20.500  +0.25" in table[1]
    assert table[1].endswith("+2.50")


@pytest.mark.slow
def test_a_commit_that_cannot_be_read_is_named_and_hides_none(host: Host) -> None:
    host.knows_the_key()
    trainer = host.trainer()
    trainer.publish(0)
    trainer.publish(1, private_key=OTHER_KEY)
    cut = trainer.run_dir / trainer.publish(2).commit_key
    cut.write_bytes(cut.read_bytes()[:50])
    good, forged, torn = host.rows()
    assert good["signature"] == "verified"
    assert "is not signed with the run's key" in forged["problem"]
    assert "is cut" in torn["problem"]
    code, out, _ = host.call()
    assert code == 0
    assert [line.split(":")[0] for line in out.splitlines()[4:6]] == ["v1", "v2"]
    assert good["live"] is True  # as far as the newest commit that can be read says


@pytest.mark.slow
def test_of_a_version_that_was_published_twice_the_later_one_is_shown(host: Host) -> None:
    trainer = host.trainer()
    trainer.publish(3)
    again = trainer.publish(3, write_adapter(host.folder / "again", seed=9)).adapter
    (row,) = host.rows("demo")
    assert row["adapter"] == again.name


@pytest.mark.slow
def test_old_versions_of_a_long_run_are_found(host: Host) -> None:
    for version in (3, 600, 1200):
        host.trainer().publish(version)
    assert [row["version"] for row in host.rows()] == [3, 600, 1200]
    assert host.call("get", "demo", "home", "--version", "3", "--unverified")[0] == 0


@pytest.mark.slow
def test_the_run_is_that_of_the_join_or_the_only_one(host: Host) -> None:
    host.trainer("other").publish(0)
    (host.folder / "bucket" / "no-run").mkdir()
    assert host.rows()[0]["run"] == "other"
    host.trainer().publish(0)
    code, _, err = host.call()
    assert code == 2
    assert "bucket: holds 2 runs: demo, other. Name one" in err
    rows = host.rows("--join", str(host.join()))
    assert (rows[0]["run"], rows[0]["signature"]) == ("demo", "verified")
    assert host.rows("other", "--join", str(host.join()))[0]["signature"] == "unverified"


def test_the_configuration_of_an_agent_says_where(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.trainer().publish(0)
    text = '[bucket]\npath = "bucket"\n[link]\njoin = "demo.join"\n[model]\npath = "gone"\n'
    (host.folder / "agent.toml").write_text(text)
    line = host.join().read_text()
    for words in (["--config", "agent.toml"], ["--bucket", "bucket"]):
        assert cli.main(["adapters", *words, "--json"]) == 0
        assert json.loads(host.capsys.readouterr().out)[0]["signature"] == "verified"
        (host.folder / "demo.join").unlink(missing_ok=True)
        monkeypatch.setenv("ASYNCGRPO_JOIN", line)


# --- get -------------------------------------------------------------------------------------


def same(folder: Path, saved: Path) -> bool:
    names = sorted(path.name for path in folder.iterdir())
    files = all((folder / name).read_bytes() == (saved / name).read_bytes() for name in names)
    return names == [CONFIG, WEIGHTS] and files


def test_the_newest_is_taken_home_as_it_was_saved(host: Host) -> None:
    host.knows_the_key()
    for version in (0, 1):
        host.trainer().publish(version)
    code, out, err = host.call("get", "demo", "home")
    assert (code, out) == (0, "")
    assert same(host.home, host.trainer().folder / "v1")
    name = rf"demo.{ATTEMPT}.v000001."
    assert err.startswith(f"wrote home: {name}")
    assert err.endswith("(4.5 kB; signed with the run's key; the newest)\n")
    mask = os.umask(0)
    os.umask(mask)
    modes = [path.stat().st_mode & 0o777 for path in (host.home, host.home / CONFIG)]
    assert modes == [0o777 & ~mask, 0o666 & ~mask]
    assert sorted(path.name for path in host.folder.iterdir()) == [
        "bucket",
        "demo",
        "home",
        "state",
    ]


@pytest.mark.slow
def test_a_version_or_an_attempt_can_be_named(host: Host) -> None:
    host.home.mkdir()  # an empty folder is as good as none
    for attempt, versions in ((ATTEMPT, (0, 1)), (NEXT, (0,))):
        for version in versions:
            host.trainer(attempt=attempt).publish(version, private_key=OTHER_KEY)
    words = ("get", "demo", "--version", "v000000", "home", "--attempt", ATTEMPT)
    code, _, err = host.call(*words, "--join", str(host.join(public_key=OTHER_PUBLIC)))
    assert (code, same(host.home, host.trainer().folder / "v0")) == (0, True)
    assert "signed with the run's key)" in err
    code, _, err = host.call("get", "demo", "newer", "--unverified")
    assert f"demo.{NEXT}.v000000." in err
    assert "signature NOT checked" in err


@pytest.mark.slow
def test_the_newest_that_can_be_read_is_taken(host: Host) -> None:
    host.knows_the_key()
    host.trainer().publish(0)
    host.trainer().publish(1, private_key=OTHER_KEY)
    assert host.call("get", "demo", "home")[0] == 0
    assert same(host.home, host.trainer().folder / "v0")


@pytest.mark.slow
def test_best_on_the_trainers_host(host: Host) -> None:
    host.knows_the_key()
    names = [host.trainer().publish(version).adapter.name for version in range(4)]
    records: list[dict[str, Any]] = [{"kind": "started", "attempt": ATTEMPT}]
    for name, reward in zip(names, (0.2, 0.9, 0.1, 0.1), strict=True):
        records += [published(name), {"kind": "metrics", "values": {"reward": reward}}]
    host.history(*records)
    code, _, err = host.call("get", "demo", "--version", "best", "home")
    assert (code, same(host.home, host.trainer().folder / "v0")) == (0, True)
    assert "; reward 0.400, mean of 3 training steps around it)" in err


@pytest.mark.slow
def test_the_result_is_there_for_every_host_once_the_run_has_ended(host: Host) -> None:
    host.knows_the_key()
    first, second = host.trainer(), host.trainer(attempt=NEXT)
    first.publish(3)
    code, _, err = host.call("get", "demo", "--version", "final", "home")
    assert code == 1
    assert f"has no result: attempt {ATTEMPT} has not ended well, or not yet; its newest" in err
    first.publish(40, shelf=RESULTS)
    first.publish(50, shelf=RESULTS)
    second.publish(60, shelf=RESULTS, private_key=OTHER_KEY)
    code, _, err = host.call("get", "demo", "--version", "final", "home")
    assert (code, same(host.home, first.folder / "v50")) == (0, True)
    assert "the result, of step 50" in err
    code, _, err = host.call("get", "demo", "--version", "final", "--attempt", NEXT, "other")
    assert code == 1
    assert "final/a0002-0000/s000060.toml" in err


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["x", "y"], 2, "unrecognized arguments: y"),
        (["../x"], 2, "'../x' is no name of a run"),
        (["--limit", "0"], 2, "'0' is no number from 1"),
        (["other"], 1, "run other: is not in the bucket. Runs that are: demo"),
        (["get", "demo"], 2, "required: DIR"),
        (["get", "demo", "home", "--version", "last"], 2, "'last' is no number, nor newest, best"),
        (["get", "demo", "home", "--attempt", "1"], 2, "'1' is no attempt such as a0003-7f3c"),
        (["get", "other", "home", "--unverified"], 1, "run other: is not in the bucket"),
        (["get", "demo", "home", "--attempt", NEXT], 1, f"attempt {NEXT} has published nothing"),
        (["get", "demo", "home", "--version", "5"], 1, "is not in the bucket, which has 1 from 0"),
        (["get", "demo", "home", "--version", "best"], 1, "needs the history of the run, which is"),
        (["get", "demo", "home", "--version", "final"], 1, "has no result: attempt a0001"),
        (["get", "demo", "bucket"], 1, "bucket: is not empty, and nothing is overwritten"),
        (["get", "demo", "demo.join"], 1, "demo.join: cannot be used: Not a directory"),
        (["get", "demo", "no/home"], 1, "no: is not there. Make it"),
        (["--config", "no.toml"], 78, "no.toml: the configuration file cannot be read"),
        (["--join", "no.join"], 78, "the join file"),
    ],
)
def test_what_cannot_be_done(host: Host, words: list[str], code: int, text: str) -> None:
    host.knows_the_key()
    host.join()
    host.trainer().publish(0)
    before = sorted(host.folder.iterdir())
    found, out, err = host.call(*words)
    assert (found, out) == (code, "")
    assert text in err
    assert sorted(host.folder.iterdir()) == before


def test_without_the_key_nothing_is_taken(host: Host) -> None:
    host.trainer().publish(0)
    code, _, err = host.call("get", "demo", "home", "--join", str(host.join("other")))
    assert code == 78
    assert "state/runs: the public key of run 'demo' is not known here" in err
    assert "the join is for run 'other'" in err
    assert "run add demo --public-key KEY. --unverified does without" in err
    host.knows_the_key(OTHER_PUBLIC)
    code, _, err = host.call("get", "demo", "home")
    assert code == 1
    assert "is not signed with the run's key" in err
    assert not host.home.exists()


def test_without_a_bucket(host: Host) -> None:
    assert cli.main(["adapters"]) == 78
    assert "bucket.path: no bucket is configured. Give --bucket DIR" in host.capsys.readouterr().err
    assert cli.main(["adapters", "--bucket", "gone"]) == 78
    assert "gone: is not there. Create it or mount it" in host.capsys.readouterr().err
    code, _, err = host.call()
    assert code == 1
    assert "bucket: holds no run" in err


@pytest.mark.slow
@pytest.mark.parametrize("unverified", [[], ["--unverified"]])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_adapter_is_refused_and_leaves_nothing(
    host: Host, damage: str, unverified: list[str]
) -> None:
    host.knows_the_key()
    host.trainer().publish(0)
    weights = host.folder / "bucket" / "demo" / "adapters" / ATTEMPT / "v000000" / WEIGHTS
    data = weights.read_bytes()
    text = {"flip": "sha256", "cut": "bytes of its commit", "gone": "its commit is there and"}
    match damage:
        case "flip":
            weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "cut":
            weights.write_bytes(data[:-1])
        case "gone":
            weights.unlink()
    before = sorted(host.folder.iterdir())
    code, _, err = host.call("get", "demo", "home", *unverified)
    assert code == 1
    assert text[damage] in err
    assert sorted(host.folder.iterdir()) == before


@pytest.mark.slow
def test_a_history_that_was_cut_is_read_on(host: Host) -> None:
    host.knows_the_key()
    name = host.trainer().publish(0).adapter.name
    host.history({"kind": "started", "attempt": ATTEMPT})
    with history_file(host.state, "demo").open("a") as file:
        file.write('{"t": 1.0, "ki')
    host.history({"kind": "lost"}, published(name))
    assert host.rows()[0]["saved"] == "2023-11-14T22:13:20.500Z"
    shutil.rmtree(host.folder / "bucket" / "demo")
    assert host.call("demo")[0] == 1
