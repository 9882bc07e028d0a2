"""Checks the files that a run reads on this machine: the tokenizer and the data."""

import json
import os
from typing import Any

from torchtitan.components.dataloader import BaseDataLoader

from titan_gdn.config.source import ConfigError
from titan_gdn.data.files import list_files


def check_tokenizer(folder: str, model: Any) -> None:
    """Check that the tokenizer's folder exists and the embedding has a row for each of its tokens.

    Raises:
        ConfigError: They do not, or the tokenizer cannot be read.
    """
    if not os.path.isdir(folder):
        raise ConfigError(f'model.hf_assets_path = "{folder}": there is no such folder')
    file = os.path.join(folder, "tokenizer.json")
    if not os.path.exists(file):
        names = set(os.listdir(folder))
        if not any(kind <= names for kind in ({"vocab.txt", "merges.txt"}, {"vocab.json", "merges.txt"})):
            raise ConfigError(
                f'model.hf_assets_path = "{folder}": it holds no tokenizer. Possible: tokenizer.json, or '
                "merges.txt with vocab.json or vocab.txt."
            )
        return
    try:
        with open(file) as stream:
            tokenizer = json.load(stream)
        vocabulary = tokenizer["model"].get("vocab", {})
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        tokens = 1 + max([*ids, *(token["id"] for token in tokenizer.get("added_tokens", []))])
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f'model.hf_assets_path = "{folder}": its tokenizer.json is not a Hugging Face tokenizer '
            f"({type(error).__name__}: {error})"
        ) from error
    rows = getattr(model, "vocab_size", tokens)
    if tokens > rows:
        raise ConfigError(
            f"model.overrides.vocab_size = {rows}: expected at least {tokens}, because the tokenizer in "
            f'model.hf_assets_path = "{folder}" has {tokens} tokens'
        )


def check_data(section: str, loader: BaseDataLoader.Config) -> None:
    """Check that the data set of a section consists of at least one text file.

    Raises:
        ConfigError: It does not.
    """
    if loader.dataset != "text_files":
        return  # known only when TorchTitan downloads it
    try:
        list_files(loader.dataset_path)
    except ValueError as error:
        raise ConfigError(f'{section}.dataset = "text_files": {error}') from error
