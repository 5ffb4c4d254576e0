"""OpenAI's /v1/embeddings: a vector of length 1 for each text."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from powerinfer.serve.api_error import ApiError
from powerinfer.serve.schema import MAX_INT, MAX_PROMPT_TOKENS, Body, TokenIds, Truncate

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_INPUTS = 2048  # OpenAI's


class EmbeddingsRequest(Body):
    """The body of /v1/embeddings. input: a text, several texts, token ids, or several lists of token ids."""

    input: (
        str
        | TokenIds
        | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPT_TOKENS)]
        | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPT_TOKENS)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None

    truncate_prompt_tokens: Truncate | None = None

    def texts(self, width: int) -> list[str | list[int]]:
        """Each text or its token ids. ApiError for what is wrong beyond types; width: of the model's embeddings."""
        self.check_extra(neutral={"add_special_tokens": (True,), "truncation_side": ("left",)})
        if self.dimensions is not None and self.dimensions > width:
            raise ApiError(400, f"dimensions must be at most the model's {width}", param="dimensions")
        value: Any = self.input
        single = isinstance(value, str) or (bool(value) and isinstance(value[0], int))
        texts: list[str | list[int]] = [value] if single else value
        if not texts or not all(texts):
            raise ApiError(400, "input is empty: every text needs at least one token", param="input")
        if len(texts) > MAX_INPUTS:
            raise ApiError(400, f"input has {len(texts)} texts: at most {MAX_INPUTS} at a time", param="input")
        return texts

    def answer(self, model: str, vectors: NDArray[np.float32], tokens: int) -> dict[str, Any]:
        """The API's list. vectors: float32 [n, width], of length 1; tokens: of all texts together."""
        if self.dimensions is not None:
            vectors = shortened(vectors, self.dimensions)
        write = _base64 if self.encoding_format == "base64" else _numbers
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": write(vector)}
                for index, vector in enumerate(vectors)
            ],
            "model": model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


def shortened(vectors: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """The first numbers of each vector, scaled to length 1 again."""
    first = vectors[:, :width].astype(np.float64)
    lengths = np.linalg.norm(first, axis=1, keepdims=True)
    result: NDArray[np.float32] = (first / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)
    return result


def _base64(vector: NDArray[np.float32]) -> str:
    return b64encode(vector.astype("<f4").tobytes()).decode()


def _numbers(vector: NDArray[np.float32]) -> list[float]:
    numbers: list[float] = vector.tolist()
    return numbers
