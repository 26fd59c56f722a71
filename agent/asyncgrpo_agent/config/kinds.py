"""What kinds of values the configuration has, and what every section is.

`title` says what a value must look like, in words for an error; `extra` marks the texts that are
paths.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, title="a whole number, 0 or more")]
Positive = Annotated[int, Meta(ge=1, title="a whole number, 1 or more")]
Seconds = Annotated[float, Meta(ge=0, title="seconds, 0 or more")]
Interval = Annotated[float, Meta(ge=1, title="seconds, 1 or more")]
Flag = Annotated[bool, Meta(title="true or false")]
Text = Annotated[str, Meta(title="text")]
Texts = Annotated[list[str], Meta(title='a list of texts, as ["a", "b"]')]
HostPort = Annotated[str, Meta(title="HOST:PORT")]
HostPorts = Annotated[list[str], Meta(title='a list of HOST:PORT, as ["a:7843"]')]
FilePath = Annotated[str, Meta(title="the path of a file", extra={"path": "any"})]
FolderPath = Annotated[str, Meta(title="the path of a folder", extra={"path": "any"})]
FolderPaths = Annotated[list[str], Meta(title="a list of folders", extra={"path": "any"})]
# A bare word is looked up on PATH.
Executable = Annotated[str, Meta(title="the path of an executable", extra={"path": "executable"})]
JoinPath = Annotated[str, Meta(title="the path of a join file, or -", extra={"path": "join"})]
RunName = Annotated[
    str,
    Meta(
        pattern=r"^([a-z0-9][a-z0-9-]{0,62})?\Z",  # part of adapters' names and of bucket keys
        title="a name of lower-case letters, digits and '-', at most 63 long",
    ),
]
RunVersion = Annotated[
    str,
    Meta(
        pattern=r"^([a-z0-9][a-z0-9-]{0,62}(@(final|newest|v?[0-9]{1,9}))?)?\Z",
        title="RUN or RUN@VERSION, where VERSION is a number, final or newest",
    ),
]
HostName = Annotated[
    str,
    Meta(
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?\Z",
        title="a name of letters, digits, '.', '_' and '-', at most 64 long",
    ),
]
_GPU: Final = r"(\d+|(GPU|MIG)-[\w/-]+)"
GpuList = Annotated[
    str, Meta(pattern=rf"^({_GPU}(,{_GPU})*)?\Z", title="GPUs by number or UUID, as 0,1")
]
ReplicaCount = Annotated[
    Literal["auto"] | Annotated[int, Meta(ge=1)], Meta(title="a whole number, 1 or more, or auto")
]
# A name of a model hub stays as it is.
DataSource = Annotated[
    str, Meta(title="the path of a file, or OWNER/NAME of a model hub", extra={"path": "data"})
]
CODE_NAME: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
CodeName = Annotated[str, Meta(pattern=rf"^{CODE_NAME.pattern}\Z")]
CodeNameOrNone = Annotated[str, Meta(pattern=rf"^({CODE_NAME.pattern})?\Z", title="module:name")]
LogLevel = Literal["debug", "info", "warning", "error"]
Dtype = Literal["auto", "bfloat16", "float16", "float32", "half", "float"]
LoraRank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]  # what vLLM accepts
BucketSource = Literal["bucket", "link"]
UploadChecksums = Annotated[
    Literal["", "off", "crc32c", "crc64nvme"], Meta(title="off, crc32c, crc64nvme or nothing")
]


_HUB_NAME: Final = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
HubName = Annotated[
    str, Meta(pattern=r"^(\w[\w.-]*/\w[\w.-]*)?\Z", title="OWNER/NAME of a model hub")
]
_FILE_SUFFIX: Final = re.compile(r"\.[A-Za-z]+")


def is_hub_name(text: str) -> bool:
    """Whether a DataSource names a dataset of a model hub, and no file."""
    is_name = _HUB_NAME.fullmatch(text) is not None
    return is_name and _FILE_SUFFIX.fullmatch(PurePath(text).suffix) is None


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """One table of the configuration; every key has a default."""
