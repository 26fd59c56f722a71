from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.config import redaction
from asyncgrpo_agent.config.keys import KEYS, keys_of
from asyncgrpo_agent.config.redaction import (
    FILTERED,
    REDACTED,
    SHOWN,
    redact,
    redact_args,
    redact_env,
    shown_text,
)
from asyncgrpo_agent.config.sections import Config, Role
from asyncgrpo_agent.config.upstreams import Upstream

SECRET = "planted-Secret-0123456789"
ALL = {f"{section}.{name}" for section, keys in KEYS.items() for name in keys}
ALL |= {f"proxy.upstream.{name}" for name in keys_of(Upstream)}


def test_it_was_decided_of_every_key_whether_it_is_shown() -> None:
    """A new key belongs into one of the two, or nobody sees it."""
    assert SHOWN | FILTERED.keys() == ALL
    assert not SHOWN & FILTERED.keys()


def test_what_nobody_listed_is_not_shown() -> None:
    assert redact("bucket", {"new": SECRET, "path": "/b"}) == {"new": REDACTED, "path": "/b"}
    assert redact("new", {"path": "/b", "table": {"a": 1}}) == {"path": REDACTED, "table": REDACTED}


PLANTED = f"""
[link]
join = "r.join"
[bucket]
path = "/b"
url = "s3://b/p"
endpoint_url = "https://me:{SECRET}@s3.example:9000/x?X-Amz-Signature={SECRET}"
[model]
path = "/m"
[engine]
args = ["--max-model-len", "512", "--x-key={SECRET}", "{SECRET}", "--chat-template", "/t",
        "--api-key", "123456", "--model=https://h/?{SECRET}", "-p{SECRET}", "--new={SECRET}"]
[engine.env]
OMP_NUM_THREADS = "2"
NCCL_TOKEN = "{SECRET}"
HARMLESS = "{SECRET}"
HTTPS_PROXY = "http://me:{SECRET}@proxy:1"
[replica]
on_exit_command = ["stop", "{SECRET}", "--id", "7"]
notice_command = ["curl", "-H", "Authorization: Bearer {SECRET}"]
"""
TRAINING = f"""
[trainer]
notice_command = ["curl", "{SECRET}"]
[train]
dataset = "/d.jsonl"
rewards = ["m:f"]
script_args = ["--lr", "1e-5", "--password", "{SECRET}"]
max_steps = 3
optim = "adamw_torch"
hub_token = "{SECRET}"
hub_model_id = "{SECRET}"
[train.model_init_kwargs]
a = "{SECRET}"
revision_count = 2
[train.lora]
r = 8
target_modules = ["q_proj"]
other = "{SECRET}"
[train.environments]
good = "m:C"
"""


@pytest.mark.parametrize("role", ["replica", "trainer"])
def test_secrets_in_any_field_are_not_shown(role: Role) -> None:
    text = PLANTED if role == "replica" else PLANTED.partition("[replica]")[0] + TRAINING
    table = tomllib.loads(text)
    shown = {name: redact(name, rows) for name, rows in table.items()}
    assert SECRET not in str(shown)
    assert "123456" not in str(shown)
    engine = shown["engine"]
    assert engine["args"][:2] == ["--max-model-len", "512"]
    assert engine["args"][4:6] == ["--chat-template", "/t"]
    assert engine["env"]["OMP_NUM_THREADS"] == "2"
    assert engine["env"]["HTTPS_PROXY"] == "http://(redacted)@proxy:1"
    assert shown["bucket"]["endpoint_url"] == "https://(redacted)@s3.example:9000/x?(redacted)"
    if role == "replica":
        command = shown["replica"]["on_exit_command"]
        assert command == ["stop", REDACTED, "--id", "7"]
    else:
        train = shown["train"]
        assert train["script_args"] == ["--lr", "1e-5", "--password", REDACTED]
        assert (train["max_steps"], train["optim"]) == (3, "adamw_torch")
        assert train["lora"] == {"r": 8, "target_modules": ["q_proj"], "other": REDACTED}
        assert train["environments"] == {"good": "m:C"}


def test_the_defaults_of_every_role_are_shown() -> None:
    for role in ("proxy", "replica", "trainer", "local"):
        assert REDACTED not in str(Config(role=role).redacted())


ANYTHING = st.recursive(
    st.just(SECRET),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "optim2", "token", "x_key"]), inner, max_size=3)
    ),
)


@given(st.sampled_from(sorted(KEYS)), st.text("abc_", min_size=1, max_size=8), ANYTHING)
def test_unlisted_keys_of_any_shape_are_not_shown(section: str, name: str, value: Any) -> None:
    if f"{section}.{name}" in ALL:
        return
    assert SECRET not in str(redact(section, {name: value}))


@given(st.lists(st.sampled_from(["--a", "--b=", "-c", "--max-num-seqs", "x", "--token"])))
def test_no_order_of_words_shows_a_secret(words: list[str]) -> None:
    args = [
        word + SECRET if word.endswith("=") else word for one in words for word in (one, SECRET)
    ]
    assert SECRET not in " ".join(redact_args(args))
    assert SECRET not in str(redact_env(dict.fromkeys(words, SECRET)))


def test_a_url_that_is_none_is_not_shown() -> None:
    assert shown_text(f"http://[{SECRET}") == REDACTED
    assert shown_text("/a/path") == "/a/path"
    assert redaction.is_secret("GATEWAY_TOKEN")
