"""Files that come with the package.

`byte_tokenizer/` is a tokenizer in Hugging Face's format that knows every text and needs no download: token
`b` is the byte `b` of the UTF-8 text (0 to 255), and token 256 is `<|endoftext|>`, which ends a document;
there is no token that begins one. Text that spells `<|endoftext|>` out becomes token 256, as in any tokenizer
of this format (`decode(ids, skip_special_tokens=False)` gives it back). It reads about 1 MB of text a second
and takes 220 bytes of memory a token meanwhile. `tokenizer.json` was made by::

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # GPT-2's alphabet: Latin-1's printable bytes stand for themselves, U+0100 and on for the others.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [ord(letter) for letter in letters if ord(letter) < 256]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = dict(zip(letters, printable + others))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    # GPT-2's regular expression, which splits text into words, only costs time where nothing is merged.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save("tokenizer.json", pretty=False)
"""

import os

BYTE_TOKENIZER: str = os.path.join(os.path.dirname(os.path.abspath(__file__)), "byte_tokenizer")
"""The folder of the byte tokenizer: `model.hf_assets_path` for a run on raw bytes (257 tokens)."""
