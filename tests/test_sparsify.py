"""Making a dense model sparse: the model in torch beside the engine's, the stages, what is kept, what is written."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_files import tiny_folder
from torch.nn import functional

from powerinfer import LLM, PowerInferError, RequestError
from powerinfer.cli.main import main
from powerinfer.config import SparsifyConfig
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.sparsify import sparsify
from powerinfer.sparsify.recipes import RECIPES
from powerinfer.sparsify.torch_model import TorchModel, load
