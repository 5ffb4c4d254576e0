"""Convert folders with llama.cpp's own converter: `python convert.py CONVERTER < JOBS`, in a process of its own, since
the converter brings its own `gguf`.

JOBS: JSON, a list of [folder, file, options of its models' class]. Its vocabulary is left out: a tiny folder has no
tokenizer that the converter knows. The output is JSON: of each job null, or why it failed.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    converter = Path(sys.argv[1])
    sys.path[:0] = [str(converter), str(converter / "gguf-py")]
    import torch
    from conversion import base, get_model_class

    logging.disable(logging.CRITICAL)

    def convert(folder: str, file: str, options: dict[str, Any]) -> None:
        settings = base.ModelBase.load_hparams(Path(folder), False)
        chosen = get_model_class(base.get_model_architecture(settings, base.ModelType.TEXT))
        for kind in (chosen, *(inner for inner in vars(chosen).values() if isinstance(inner, type))):
            kind.set_vocab = chosen._set_vocab_none  # of those within, too, which it may hand over to
        if chosen.supports_mtp_export:
            chosen.no_mtp = True
        chosen(Path(folder), base.gguf.LlamaFileType.ALL_F32, Path(file), **options).write()

    said: list[str | None] = []
    with torch.inference_mode():
        for folder, file, options in json.load(sys.stdin):
            try:
                convert(folder, file, options)
                said.append(None)
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}"[:300])
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
