"""Everything here runs offline and on CPU, with models that are built on the spot."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# the matrices here are too small for a second thread to pay, and one thread makes runs repeatable
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list) -> None:
    """The shell lines first: they are one test, and take as long as all other slow ones together."""
    items.sort(key=lambda item: item.path.name != "test_shell_lines.py")
