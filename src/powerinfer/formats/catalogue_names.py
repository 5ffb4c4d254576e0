"""Names of models as people write them: those of the catalogue in any spelling, Ollama's, and those of no model.

Imports no numpy, for which no completion of a command line should wait, until a model is looked up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from powerinfer.errors import RequestError

if TYPE_CHECKING:
    from powerinfer.formats.catalogue import CatalogueModel, Download, Memory

_TAGS = r"(?:ud-)?(?:i?q\d\w*|tq\d\w*|mxfp4\w*|nvfp4|bf16|fp?16|f32)"
_QUANTISED = re.compile(rf"(?P<head>.+?)[:-](?P<tag>{_TAGS})", re.IGNORECASE)
"""A name with a quantisation: qwen3-4b:Q8_0, and as Ollama writes it, qwen3:4b-q8_0."""
_STATED = re.compile(rf"(?P<head>.+?)(?:[-._]{_TAGS})?", re.IGNORECASE | re.DOTALL)
"""The name of a file, with a quantisation or without."""
_SIZE = re.compile(r"(?:^|[-_: ])([ae]?\d+(?:\.\d+)?[bm])(?=$|[-_: ])", re.IGNORECASE)
"""A number of parameters in a name: 30b; a3b, of a token; e4b, as Gemma says."""

_LONGEST = 120


def name_form(name: str) -> str:
    """The form of a short name in which its spellings agree: Llama-3.2-3B-Instruct, llama3.2:3b, llama-3.2-3b."""
    form = re.sub(r"[-_:]+", "-", name.lower().removesuffix(":latest"))
    form = re.sub(r"(?:-(?:instruct|it|chat|gguf))+$", "", form)
    return re.sub(r"(?<=[a-z])-(?=\d)", "", form)


def _short_names() -> dict[str, str]:
    models = json.loads(Path(__file__).with_name("catalogue.json").read_bytes())["models"]
    return {name_form(alias): name for name, one in models.items() for alias in (*one.get("aliases", ()), name)}


SHORT_NAMES: Mapping[str, str] = _short_names()
"""The short names by the forms of themselves and of their aliases."""


def short_name(name: str) -> tuple[str, str | None] | None:
    """(the short name, the quantisation that is asked for) that a text in any spelling says; None if it says none."""
    if len(name) > _LONGEST:  # a prompt, which is compared with names, too
        return None
    names = SHORT_NAMES
    if name_form(name) in names:
        return names[name_form(name)], None
    head, separator, tag = name.partition(":")
    quantised = _QUANTISED.fullmatch(name)
    if quantised is not None and name_form(quantised["head"]) in names:
        head, tag = quantised["head"], re.sub("^fp", "f", quantised["tag"], flags=re.IGNORECASE)
    elif not separator or _SIZE.match(tag) or name_form(names.get(name_form(head), "")) != name_form(head):
        return None  # qwen3:235b is no qwen3-8b, and llama4:maverick no llama-4-scout
    short = names.get(name_form(head))
    return (short, tag) if short is not None and tag else None


def quantised_name(name: str, quantisation: str) -> str:
    """The name of a model's file in a quantisation, in place of the one that it has: m-F16 -> m-Q4_K_M."""
    stated = _STATED.fullmatch(re.sub(r"-\d{5}-of-\d{5}$", "", name))
    return f"{name if stated is None else stated['head']}-{quantisation}"


def full_name(name: str) -> str:
    """The Hugging Face name that a short name (qwen3-4b, qwen3-4b:Q8_0) stands for, in its usual quantisation unless it
    says another; other names as they are."""
    from powerinfer.formats.catalogue import catalogue

    short = short_name(name)
    if short is None:
        return name
    download = catalogue()[short[0]].download(short[1])
    return catalogue()[short[0]].full_name(short[1] if download is None else download.quantisation)


def machine_memory() -> Memory:
    """The memory of this machine, as a choice of what to download counts it."""
    from powerinfer.formats.catalogue import Memory
    from powerinfer.system import gpu_memory, total_memory

    return Memory(total_memory(), gpu_memory())


def chosen(name: str) -> tuple[str, CatalogueModel, Download, str] | None:
    """(short name, model, what of it suits this machine, the reason) of a short name that says no quantisation; None of
    others. RequestError if the model is too large for this machine."""
    from powerinfer.formats.catalogue import catalogue

    short = short_name(name)
    if short is None or short[1] is not None:
        return None
    model, memory = catalogue()[short[0]], machine_memory()
    choice = model.choose(memory)
    if choice is None:
        raise _too_large(short[0], model.downloads[0], model.active is not None, memory)
    return short[0], model, *choice


def offer(name: str) -> tuple[str, str]:
    """(full name, what its download brings) of a name. RequestError as of `chosen`."""
    from powerinfer.formats.catalogue import catalogue

    choice, short = chosen(name), short_name(name)
    if choice is not None:
        _, model, download, reason = choice
        full = model.full_name(download.quantisation)
        return full, f"{full} of Hugging Face, {download.size}, {reason}"
    named = None if short is None else catalogue()[short[0]].download(short[1])
    return full_name(name), f"{full_name(name)} of Hugging Face{'' if named is None else f', {named.size}'}"


def _too_large(name: str, usual: Download, experts: bool, memory: Memory) -> RequestError:
    from powerinfer.formats.catalogue import catalogue, gigabytes, nearest

    other = nearest(None, experts, memory)
    fitting = f"; {other} fits ({catalogue()[other].downloads[0].size})" if other is not None else ""
    anyway = f"`powerinfer pull {catalogue()[name].full_name()}` downloads it anyway"
    return RequestError(
        f"{name} ({usual.size}) needs {gigabytes(usual.needed)} of RAM and GPU memory together, and this machine has "
        f"{gigabytes(memory.usable)} for it, of {memory}{fitting}; {anyway}, and what memory does not hold is read "
        "from disk, slowly"
    )


def unsupported(name: str) -> RequestError | None:
    """The answer to the name of a model of a family that this engine does not run."""
    from powerinfer.formats.catalogue import unsupported_families

    form = name_form(name[:_LONGEST])
    for family in unsupported_families():
        for start in family.names:
            rest = form.removeprefix(start)
            if form.startswith(start) and (not rest or rest[0] == "-" or (rest[0].isdigit() and start[-1].isalpha())):
                return RequestError(f"{name}: the family {family.family} is not supported yet; {_instead(name)}")
    return None


def _instead(name: str) -> str:
    """The end of a sentence about a model that does not run: one of its size and kind that does, on this machine."""
    from powerinfer.formats.catalogue import nearest

    sizes = [(one[0], float(one.lstrip("ae")[:-1])) for one in _SIZE.findall(name.lower()) if one[-1] == "b"]
    totals = [size for letter, size in sizes if letter != "a"]
    other = nearest(max(totals), any(letter == "a" for letter, _ in sizes), machine_memory()) if totals else None
    return "`powerinfer pull --names` lists what is" if other is None else f"{other} is, and fits this machine"


def similar_name(name: str, names: Collection[str]) -> str | None:
    """The one of some names that another may mean: of the same sizes, where it says any, and of a model that this
    machine can run."""
    from difflib import get_close_matches

    from powerinfer.formats.catalogue import catalogue

    if len(name) > _LONGEST:
        return None
    wanted, form = _sizes(name), name_form(name)
    forms = {name_form(form_): form_ for form_ in names}
    near = [form_ for form_ in forms if form_.startswith(form) and wanted <= _sizes(forms[form_])]
    near += get_close_matches(form, [form_ for form_ in forms if wanted == _sizes(forms[form_])], n=3, cutoff=0.65)
    near = near or ([] if wanted else get_close_matches(form, forms, n=3, cutoff=0.85))  # qwen3-4c
    memory = machine_memory()
    for form_ in near:
        model = catalogue().get(forms[form_])
        if model is None or model.choose(memory) is not None:
            return forms[form_]
    return None


def _sizes(name: str) -> set[str]:
    """Sizes that a name says, and "moe"."""
    return {*_SIZE.findall(name.lower()), *(["moe"] if "moe" in name.lower() else [])}
