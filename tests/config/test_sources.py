import io
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgrpo_agent.config.example import example
from asyncgrpo_agent.config.host import check_host, engine_python, join_line, resolved
from asyncgrpo_agent.config.keys import KEYS
from asyncgrpo_agent.config.sections import ROLES, SECTIONS, SECTIONS_OF, Config, Role, host_port
from asyncgrpo_agent.config.sources import Document, Setting, default_state_dir, load, parse
from asyncgrpo_agent.errors import ConfigError, UsageError

EXAMPLES = Path(__file__).parents[2] / "packaging" / "examples"
FOLDER = Path("/etc/agent")
CWD = Path("/home/me")
LOCAL = """
[model]
path = "model"
[train]
dataset = "prompts.jsonl"
rewards = ["rewards:exact"]
"""


def configure(
    text: str = "",
    *,
    role: Role = "proxy",
    environ: Mapping[str, str] | None = None,
    settings: Sequence[tuple[str, str]] = (),  # path and text
    engine_args: Sequence[str] = (),
) -> Config:
    return parse(
        role=role,
        document=Document(text=text, name="agent.toml", folder=FOLDER),
        environ={"HOME": "/home/me", **(environ or {})},
        settings=[Setting(path=path, value=value, origin="--set") for path, value in settings],
        engine_args=engine_args,
        cwd=CWD,
    )


def problems(text: str = "", **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        configure(text, **options)
    assert caught.value.exit_code == 78
    return str(caught.value)


# --- sources ---------------------------------------------------------------------------------


def test_flags_win_over_environment_over_file_over_defaults() -> None:
    text = "[replica]\ncapacity = 2\ndrain_s = 2\nwarm_up = true\n"
    environ = {"ASYNCGRPO_REPLICA_CAPACITY": "3", "ASYNCGRPO_REPLICA_DRAIN_S": "3"}
    config = configure(text, environ=environ, settings=[("replica.capacity", "4")])
    assert (config.replica.capacity, config.replica.drain_s) == (4, 3)
    assert (config.replica.warm_up, config.trainer.quorum) == (True, 0.5)
    assert config.origins == {
        "replica.capacity": "--set",
        "replica.drain_s": "ASYNCGRPO_REPLICA_DRAIN_S",
        "replica.warm_up": "agent.toml",
    }


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("7", "run.name", "7"),  # a text is wanted, so a number is one
        ('"quoted"', "run.name", "quoted"),
        ("1", "agent.log_json", True),
        ("True", "agent.log_json", True),
        ("off", "agent.log_json", False),
        ('["--a", "b c"]', "engine.args", ["--a", "b c"]),
        ("0.25", "trainer.quorum", 0.25),
        ("1", "trainer.quorum", 1.0),
        ("32", "engine.max_lora_rank", 32),
        ("debug", "agent.log_level", "debug"),
    ],
)
def test_text_is_read_by_the_type_of_its_key(text: str, path: str, value: object) -> None:
    assert configure(settings=[(path, text)]).value(path) == value


def test_every_key_has_a_variable() -> None:
    environ = {
        "ASYNCGRPO_TRAIN_EVAL_SAMPLES": "5",
        "ASYNCGRPO_TRAIN_EVAL_STEPS": "6",  # TRL's eval_steps, not a key of [train.eval]
        "ASYNCGRPO_TRAIN_LORA_R": "8",
        "ASYNCGRPO_TRAIN_LEARNING_RATE": "1e-5",
        "ASYNCGRPO_TRAIN_REPORT_TO": "none",
        "ASYNCGRPO_ENGINE_ENV": '{A = "1"}',
        "ASYNCGRPO_STATE_DIR": "state",
    }
    config = configure(environ=environ)
    assert config.train.eval.samples == 5
    assert config.train.lora == {"r": 8}
    assert config.train.passthrough == {"eval_steps": 6, "learning_rate": 1e-5, "report_to": "none"}
    assert config.engine.env == {"A": "1"}
    assert config.state_dir == CWD / "state"


def test_an_empty_variable_counts_as_unset() -> None:
    assert configure(environ={"ASYNCGRPO_REPLICA_CAPACITY": ""}).replica.capacity == 64


def test_an_unknown_variable_is_a_problem() -> None:
    text = problems(environ={"ASYNCGRPO_TRAINER_QUORUMM": "1"})
    assert text.startswith("$ASYNCGRPO_TRAINER_QUORUMM: unknown variable")
    assert text.endswith("Did you mean $ASYNCGRPO_TRAINER_QUORUM?")


def test_tables_merge_entry_by_entry() -> None:
    text = '[engine.env]\nA = "1"\nB = "1"\n[train.lora]\nr = 8\nlora_alpha = 16\n'
    settings = [("engine.env.B", "2"), ("train.lora", "{r = 16}"), ("train.fsdp_config.x", "1")]
    config = configure(text, settings=settings)
    assert config.engine.env == {"A": "1", "B": "2"}
    assert config.train.lora == {"r": 16, "lora_alpha": 16}
    assert config.train.passthrough == {"fsdp_config": {"x": 1}}


def test_words_after_the_dashes_follow_those_of_the_file() -> None:
    config = configure('[engine]\nargs = ["--a"]\n', engine_args=["--b", "1"])
    assert config.engine.args == ["--a", "--b", "1"]


def test_relative_paths_count_from_where_they_were_written() -> None:
    text = '[model]\npath = "model"\n[train]\npython_path = ["src", "/abs"]\n'
    config = configure(text, settings=[("bucket.path", "bucket"), ("engine.python", "python3")])
    assert config.model.path == "/etc/agent/model"
    assert config.train.python_path == ["/etc/agent/src", "/abs"]
    assert config.bucket.path == "/home/me/bucket"
    assert config.engine.python == "python3"  # a bare word is looked up on PATH


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"STATE_DIRECTORY": "/var/lib/a:/var/lib/b", "HOME": "/h"}, "/var/lib/a"),
        ({"XDG_STATE_HOME": "/x", "HOME": "/h"}, "/x/asyncgrpo-agent"),
        ({"XDG_STATE_HOME": "relative", "HOME": "/h"}, "/h/.local/state/asyncgrpo-agent"),
    ],
)
def test_default_state_dir(environ: Mapping[str, str], folder: str) -> None:
    assert default_state_dir(environ) == Path(folder)


def test_role_and_file_may_come_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text("[proxy]\nqueue_limit = 5\n")
    environ = {"ASYNCGRPO_ROLE": "proxy", "ASYNCGRPO_CONFIG": str(file), "HOME": "/h"}
    config = load(role=None, file=None, environ=environ)
    assert (config.role, config.proxy.queue_limit) == ("proxy", 5)


@pytest.mark.parametrize("role", [None, "worker"])
def test_a_role_must_be_named(role: str | None) -> None:
    with pytest.raises(UsageError, match=r"--role proxy\|replica\|trainer\|local"):
        load(role=role, file=None, environ={})


# --- problems --------------------------------------------------------------------------------


def test_every_problem_is_reported_at_once_with_its_origin() -> None:
    text = problems(
        '[replica]\ncapacity = "many"\ncapactiy = 3\n[nonsense]\nx = 1\n[trainer]\nquorum = 2\n',
        role="trainer",
        environ={"ASYNCGRPO_LOCAL_REPLICAS": "0"},
        settings=[("engine.dtype", "int3"), ("max_loras", "3")],
    )
    assert text.splitlines() == [
        "12 problems in the configuration:",
        '  replica.capacity (agent.toml): expected a whole number, 1 or more, got "many"',
        "  replica.capactiy (agent.toml): unknown key. Did you mean replica.capacity?",
        "  nonsense.x (agent.toml): unknown key. Sections are "
        + ", ".join(SECTIONS)
        + "; `asyncgrpo-agent init` writes out every key",
        "  trainer.quorum (agent.toml): expected a number from 0 to 1, got 2",
        "  local.replicas (ASYNCGRPO_LOCAL_REPLICAS): expected a whole number, 1 or more, got 0",
        "  engine.dtype (--set): expected one of auto, bfloat16, float16, float32, half, float, "
        'got "int3"',
        "  max_loras (--set): unknown key. Did you mean engine.max_loras?",
        *text.splitlines()[8:],
    ]
    assert len(text.splitlines()) == 13
    for path in ("link.join", "bucket.path", "model.path", "train.dataset", "train.rewards"):
        assert f"  {path}: missing, and role trainer needs it. Set it" in text


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("trainer.quorum", "nan"),
        ("trainer.sync_timeout_s", "inf"),
        ("trainer.sync_timeout_s", "-1"),
        ("engine.max_lora_rank", "7"),
        ("replica.capacity", "1.5"),
        ("replica.capacity", "true"),
        ("agent.log_json", "maybe"),
        ("run.name", "../up"),
        ("train.rewards", '["no-colon"]'),
        ("train.rewards", "module:function"),
        ("engine.env.A.B", "1"),
        ("replica.capacity.x", "1"),
        ("train.eval", "3"),
        ("agent", "3"),
    ],
)
def test_impossible_values_are_refused(path: str, value: str) -> None:
    assert path in problems(settings=[(path, value)])


def test_a_misspelt_key_of_train_is_not_handed_to_trl() -> None:
    assert "Did you mean train.rewards?" in problems('[train]\nreward = ["a:b"]\n')


def test_bad_toml_names_file_line_and_column() -> None:
    text = problems("[agent]\nlog_json = maybe\n")
    assert text == "agent.toml: not valid TOML: Invalid value (at line 2, column 12)"


def test_an_unreadable_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        load(role="proxy", file=str(tmp_path / "none.toml"), environ={})
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 2"):
        load(role="proxy", file=str(tmp_path / "latin.toml"), environ={})


SCALARS = st.one_of(
    st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.sampled_from(["a:1", "a:b"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
NAMES = st.sampled_from([f"{s}.{name}" for s, keys in KEYS.items() for name in keys]) | st.text()


@given(values=st.dictionaries(NAMES, VALUES), texts=st.dictionaries(NAMES, st.text()))
@settings(max_examples=60, deadline=None)
def test_anything_gives_a_configuration_or_one_error(
    values: dict[str, Any], texts: dict[str, str]
) -> None:
    table: dict[str, Any] = {}
    for dotted, value in values.items():
        section, _, name = dotted.rpartition(".")
        table.setdefault(section, {})[name] = value
    try:
        config = configure(tomli_w.dumps(table), settings=list(texts.items()))
    except ConfigError:
        return
    assert configure(config.to_toml()) == config


def test_secrets_are_not_repeated_in_problems() -> None:
    line = "eyJ" + "A" * 300
    for options in ({"settings": [("link.join", line)]}, {"text": f'[link]\njoin = "{line}"\n'}):
        text = problems(**options)
        assert "this is a join line, which is a secret" in text
        assert "AAAA" not in text
    assert "12345" not in problems("[engine.env]\nTOKEN = 12345\n")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[proxy]\nlisten = "7843"\n', "proxy.listen (agent.toml): expected HOST:PORT"),
        ('[proxy]\npublic_addresses = ["a:0"]\n', "port 0 cannot be dialled"),
        ('[link]\nproxy = "::1:7843"\n', "link.proxy (agent.toml): expected HOST:PORT"),
        ('[trainer]\ngateway = "0.0.0.0:80"\n', "not a loopback address"),
        ('[telemetry]\nlisten = "0.0.0.0:80"\n', "telemetry.allow_remote"),
        ('[telemetry]\nlisten = "here"\n', "expected HOST:PORT"),
        ('[proxy]\ncertificate = "a.pem"\n', "proxy.certificate (agent.toml): useless without"),
        ('[proxy]\nkey = "a.pem"\n', "proxy.key (agent.toml): useless without proxy.certificate"),
        ('[train]\ndataset = "a.txt"\n', "of no kind that can be read"),
        ('[train]\ndataset = "data/a.txt"\n', "of no kind that can be read"),
        ("[train]\nreward_weights = [1, 2, 3]\n", "3 weights for 0 rewards"),
        ('[train.environments]\na = "game"\n', "expected module:Class, got 'game'"),
        (
            '[train]\nenvironment_factory = "m:A"\n[train.environments]\nb = "m:B"\n',
            "useless beside train.environment_factory",
        ),
        ('[train]\ntools = ["m:f"]\n[train.eval]\nsamples = 1\n', "sampled without tools"),
        (
            '[train]\nvllm_server_base_url = "x"\n',
            "train.vllm_server_base_url (agent.toml): set by",
        ),
        ("[train]\nrequest_timeout = 9\n", "Use trainer.request_timeout_s"),
        ("[engine]\nmax_lora_rank = 8\n[train.lora]\nr = 16\n", "rank 16 is more than"),
        ('[replica]\non_exit_command = [""]\n', "the first word, its program, is empty"),
    ],
)
def test_rules(text: str, problem: str) -> None:
    assert problem in problems(text)


def test_a_dataset_of_a_hub_keeps_its_name() -> None:
    text = '[train]\ndataset = "trl-lib/DeepMath-103K"\n[train.eval]\ndataset = "held/out.jsonl"\n'
    config = configure(text)
    assert config.train.dataset == "trl-lib/DeepMath-103K"
    assert config.train.eval.dataset.endswith("/held/out.jsonl")
    assert config.train.eval.dataset.startswith("/")


def test_an_environment_may_give_prompts_and_rewards() -> None:
    text = '[train]\nenvironment_factory = "games:Chess"\ndataset = ""\nrewards = []\n'
    assert configure(text).train.environment_factory == "games:Chess"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[engine]\nmax_loras = 7\n", "7 slots are too few for max_staleness 4"),
        ("[trainer]\nmin_replicas = 3\n", "3 is more than local.replicas 2"),
        ("[train.lora]\nr = 32\n", "rank 32 is more than engine.max_lora_rank 16"),
        ("[replica]\nidle_exit_s = 9\n", "replica.idle_exit_s (agent.toml): a local fleet ends"),
        ('[replica]\non_exit_command = ["halt"]\n', "and its host is shared. Leave it out"),
    ],
)
def test_rules_of_a_local_fleet(text: str, problem: str) -> None:
    assert problem in problems(LOCAL + text, role="local")


def test_staleness_decides_how_many_adapters_a_local_engine_needs() -> None:
    settings = [("train.max_staleness", "2"), ("engine.max_loras", "6")]
    assert configure(LOCAL, role="local", settings=settings).engine.max_loras == 6
    assert "got 'two'" in problems(LOCAL, role="local", settings=[("train.max_staleness", "two")])


@pytest.mark.parametrize(
    "flag",
    [
        "--uds", "--host", "--port", "--model", "--served-model-name", "--enable-lora",
        "--no-enable-lora", "--max-loras", "--max-lora-rank", "--dtype", "--api-key",
        "--ssl-keyfile", "--data-parallel-size", "--data-parallel-size-local", "-dp", "-dpl",
        "--api-server-count", "--lora-modules", "--root-path", "--trust-remote-code", "--config",
    ],
)  # fmt: skip
def test_flags_that_the_agent_owns_are_refused_in_every_spelling(flag: str) -> None:
    for words in ([flag, "1"], [f"{flag}=1"], ["--" + flag.lstrip("-").replace("-", "_"), "1"]):
        assert "is set by the agent" in problems(engine_args=words)
        assert "(command line after --)" in problems(engine_args=words)
    assert "engine.args (agent.toml)" in problems(f'[engine]\nargs = ["{flag}=1"]\n')


def test_other_flags_of_vllm_are_free() -> None:
    words = [
        "--max-model-len=512",
        "--max-cpu-loras",
        "9",
        "--load-format",
        "dummy",
        "--model-impl=x",
    ]
    assert configure(engine_args=words).engine.args == words


@pytest.mark.parametrize(
    ("text", "parts"),
    [("a.b:1", ("a.b", 1)), ("[::1]:65535", ("::1", 65535)), ("127.0.0.1:0", ("127.0.0.1", 0))],
)
def test_host_port(text: str, parts: tuple[str, int]) -> None:
    assert host_port(text) == parts


@pytest.mark.parametrize("text", ["", "a", ":1", "a:", "a:x", "a:65536", "::1:7", "a b:1", "u@h:1"])
def test_no_host_port(text: str) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        host_port(text)


# --- roles -----------------------------------------------------------------------------------


def test_a_join_line_in_the_environment_replaces_the_file() -> None:
    text = '[bucket]\npath = "/b"\n[model]\npath = "/m"\n'
    config = configure(text, role="replica", environ={"ASYNCGRPO_JOIN": "line"})
    assert config.join_line == "line"
    assert "line'" not in repr(config)
    assert config.redacted()["link"]["join"] == "(in $ASYNCGRPO_JOIN)"
    assert "line" not in config.to_table()["link"]["join"]


def test_a_local_fleet_has_a_bucket_of_its_own() -> None:
    config = configure(LOCAL, role="local")
    assert config.bucket.path == f"{config.state_dir}/bucket"


def test_a_config_survives_being_handed_to_a_child_agent() -> None:
    text = (
        LOCAL
        + 'max_steps = 3\n[train.lora]\nr = 8\n[train.eval]\nsamples = 2\n[engine.env]\nA = "b"'
    )
    config = configure(text, role="local", engine_args=["--enforce-eager"])
    assert configure(config.to_toml(), role="local") == config


def test_redacted_hides_secrets_only() -> None:
    text = """
    hub_token = "hush5"
    [engine]
    args = ["--hf-token", "hush1", "--x-key=hush2", "--max-model-len", "512"]
    [engine.env]
    HF_TOKEN = "hush3"
    HTTPS_PROXY = "http://me:hush4@proxy:1"
    OMP_NUM_THREADS = "2"
    """
    shown = configure(LOCAL + text, role="local").redacted()
    assert not any(secret in str(shown) for secret in ("hush1", "hush2", "hush3", "hush4", "hush5"))
    assert shown["engine"]["env"]["OMP_NUM_THREADS"] == "2"
    assert shown["engine"]["args"][-2:] == ["--max-model-len", "512"]


def test_a_stop_call_is_shown_without_its_secrets() -> None:
    text = '[replica]\non_exit_command = ["stop", "--api-key", "hush1", "--token=hush2", "job-1"]\n'
    text += '[link]\njoin = "j"\n[bucket]\npath = "b"\n[model]\npath = "m"\n'
    shown = configure(text, role="replica").redacted()
    assert shown["replica"]["on_exit_command"] == [
        "stop",
        "--api-key",
        "(redacted)",
        "--token=(redacted)",
        "(redacted)",
    ]


@pytest.mark.parametrize("role", ROLES)
def test_the_example_names_every_key_with_its_default(role: Role) -> None:
    text = example(role)
    table = tomllib.loads(text.replace("\n#", "\n").replace("\n ", "\n# "))
    for section in SECTIONS_OF[role]:
        found: Any = table
        for name in section.split("."):
            found = found[name]
        for key in KEYS[section].values():
            rows = [key.row_type()] if key.row_type is not None else key.default
            assert found[key.name] == msgspec.to_builtins(rows)
    for line in text.splitlines():
        assert len(line) <= 100


def test_the_example_of_a_proxy_works_as_it_is() -> None:
    assert configure(example("proxy")) == configure()


def test_the_example_of_a_trainer_lacks_only_what_is_needed() -> None:
    text = problems(example("trainer"), role="trainer")
    assert text.startswith("5 problems")
    assert text.count("missing, and role trainer needs it") == 5


@pytest.mark.parametrize("role", ROLES)
def test_packaged_examples_are_valid(role: Role) -> None:
    config = load(role=role, file=str(EXAMPLES / f"{role}.toml"), environ={"HOME": "/h"})
    assert config.role == role


def test_every_key_is_documented() -> None:
    for section, keys in KEYS.items():
        for key in keys.values():
            assert key.doc.endswith("."), f"{section}.{key.name}"
            assert key.expects


# --- host ------------------------------------------------------------------------------------


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host that has everything that `trainer_text` names."""
    for name in ("bucket", "model", "src"):
        (tmp_path / name).mkdir()
    for name in ("model/config.json", "prompts.jsonl", "join", "python"):
        (tmp_path / name).write_text("line\n")
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "join").chmod(0o600)
    return tmp_path


def on_host(host: Path, role: Role = "trainer") -> Config:
    text = """
    link.join = "join"
    bucket.path = "bucket"
    model.path = "model"
    engine.python = "./python"
    train.dataset = "prompts.jsonl"
    train.rewards = ["a:b"]
    train.python_path = ["src"]
    agent.state_dir = "state"
    """
    return parse(role=role, document=Document(text=text, name="t.toml", folder=host), cwd=host)


@pytest.mark.parametrize("role", ROLES)
def test_a_complete_host_passes(host: Path, role: Role) -> None:
    check_host(on_host(host, role))


def test_everything_that_a_host_lacks_is_reported_at_once(host: Path) -> None:
    config = on_host(host)
    (host / "bucket").rmdir()
    (host / "model/config.json").unlink()
    (host / "python").chmod(0o644)
    for name in ("prompts.jsonl", "join"):
        (host / name).unlink()
    (host / "join").mkdir()
    (host / "src").rmdir()
    (host / "state").write_text("")
    with pytest.raises(ConfigError) as caught:
        check_host(config)
    assert str(caught.value).replace(str(host), "H").splitlines() == [
        "7 problems in the configuration:",
        "  agent.state_dir (t.toml): H/state is not a folder. Move it away or use --state-dir",
        "  link.join (t.toml): H/join is not a file. `asyncgrpo-agent token create` on the proxy "
        "makes it",
        "  bucket.path (t.toml): H/bucket does not exist. Create it or mount it",
        "  model.path (t.toml): H/model has no config.json. Give the folder that holds the model's "
        "own files",
        "  engine.python (t.toml): H/python is not an executable file. Give the bin/python of an "
        "environment",
        "  train.dataset (t.toml): H/prompts.jsonl does not exist. Give a file on this host",
        "  train.python_path (t.toml): H/src does not exist",
    ]


def test_a_role_gets_the_engine_and_the_join_line_of_its_host(host: Path) -> None:
    config = resolved(on_host(host), io.StringIO())
    assert config.engine.python == f"{host}/python"
    assert config.join_line == "line"
    assert "'line'" not in repr(config.redacted())
    assert resolved(on_host(host, "local"), io.StringIO()).join_line == ""


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_join_file_that_others_can_read_is_refused(host: Path, mode: int) -> None:
    (host / "join").chmod(mode)
    with pytest.raises(ConfigError) as caught:
        resolved(on_host(host), io.StringIO())
    text = f"link.join (t.toml): {host}/join can be read by others (mode {mode:04o})"
    assert f"{text}. chmod 600 {host}/join" in str(caught.value)


def test_a_credential_of_systemd_is_guarded_by_other_means(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (host / "join").chmod(0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(host))
    assert resolved(on_host(host), io.StringIO()).join_line == "line"


def test_a_local_fleet_creates_its_own_bucket(host: Path) -> None:
    text = LOCAL + f'[engine]\npython = "{host}/python"\n'
    document = Document(text=text, name="t.toml", folder=host)
    check_host(parse(role="local", document=document, environ={"HOME": str(host)}, cwd=host))


def test_the_engine_is_looked_up_on_path(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(host))
    config = parse(role="proxy", cwd=host, environ={"ASYNCGRPO_ENGINE_PYTHON": "python"})
    assert engine_python(config) == host / "python"


def test_the_join_line_comes_from_variable_stdin_or_file(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = io.StringIO("from stdin\n")
    by_variable = parse(role="proxy", cwd=host, environ={"ASYNCGRPO_JOIN": "from variable "})
    by_file = on_host(host)
    by_stdin = parse(role="proxy", cwd=host, environ={"ASYNCGRPO_LINK_JOIN": "-"})
    lines = [join_line(config, stdin) for config in (by_variable, by_file, by_stdin)]
    assert lines == ["from variable", "line", "from stdin"]
    (host / "join").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        join_line(by_file, stdin)
