"""Sixty runs with one thing wrong: each is told in a line, hangs nowhere and loses nothing that was saved.

Every case starts from the same run on two ranks, which has saved steps 2 and 4 and goes on to step 6. A case
changes a key, a file, a folder, or sends a signal. What must hold for all of them is in `check`.
"""

import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests import endings, hf, interruption_cases
from titan_gdn.checkpoint.steps import complete_steps

DENSE = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_experts": 0}
CASES = {}
REFUSED, FAILED = 2, 1


@dataclass
class Run:
    """One case's copy of the run."""

    folder: Path
    argv: list[str]
    touched: set[str] = field(default_factory=set)  # steps that the case itself damages
    prepare: object = None
    act: object = None

    @property
    def toml(self):
        return self.folder / "run.toml"

    @property
    def steps(self):
        return self.folder / "out" / "checkpoint"

    def set(self, *words):
        self.argv += words

    def damage(self, step):
        self.touched.add(f"step-{step}")
        return self.steps / f"step-{step}"

    def fresh(self):
        """Start without the saved steps."""
        shutil.rmtree(self.steps)
        self.steps.parent.joinpath("checkpoint").mkdir()


def case(code, says=""):
    def add(function):
        CASES[function.__name__] = (function, code, says)
        return function

    return add


def key(name, code, says, *words):
    CASES[name] = (lambda run: run.set(*words), code, says)


# --- keys ---

key("an_unknown_key", REFUSED, "training.sequence_len", "--training.sequence_len", "64")
key("a_key_in_the_wrong_section", REFUSED, r"optimizer\.lr", "--training.lr", "1e-3")
key("a_word_for_a_number", REFUSED, "training.steps", "--training.steps", "many")
key("an_infinite_learning_rate", REFUSED, r"optimizer\.lr", "--optimizer.lr", "inf")
key("a_decay_that_is_not_a_number", REFUSED, "weight_decay", "--optimizer.weight_decay", "nan")
key("a_seed_beyond_64_bits", REFUSED, "debug.seed", "--debug.seed", str(2**70))
key("a_row_longer_than_an_integer", REFUSED, "training.seq_len", "--training.seq_len", str(2**70))
key("a_row_that_two_ranks_cannot_share", REFUSED, "training.seq_len = 63", "--training.seq_len", "63")
key("three_ranks_of_tensor_parallelism", REFUSED, "parallelism", "--parallelism.tensor_parallel_degree", "3")
key("a_step_that_was_not_saved", REFUSED, r"Possible: -1 \(the newest\), 2, 4", "--checkpoint.load_step", "3")
key("fewer_steps_than_were_taken", REFUSED, "training.steps = 3", "--training.steps", "3")
key("no_name_for_the_dump_folder", REFUSED, "job.dump_folder", "--job.dump_folder", "")
key("a_dump_folder_that_cannot_be_made", REFUSED, "job.dump_folder", "--job.dump_folder", "/proc/outputs")
key("no_such_tokenizer", REFUSED, "model.hf_assets_path", "--model.hf_assets_path", "/nowhere")
key("no_such_texts", REFUSED, "dataset_path", "--dataloader.dataset_path", "/nowhere")
key("an_exchange_that_does_not_exist", REFUSED, "exchange", "--linear_attention.exchange", "ring")
key("another_model_than_the_step_holds", REFUSED, "step-4", "--model.overrides.dim", "96")
key("a_batch_that_ranks_cannot_share", REFUSED, "global_batch_size", "--training.global_batch_size", "6")
key("an_empty_list_of_rows", REFUSED, "local_batch_size", "--training.local_batch_size", "0")
key("a_gradient_norm_of_zero", REFUSED, "max_norm", "--training.max_norm", "0")


@case(REFUSED, "dump_folder")
def a_file_where_the_dump_folder_is(run):
    (run.folder / "taken").write_text("")
    run.set("--job.dump_folder", str(run.folder / "taken"))


@case(REFUSED, "checkpoint.folder")
def a_file_where_the_steps_are(run):
    (run.folder / "out" / "taken").write_text("")
    run.set("--checkpoint.folder", "taken")


# --- the file of the run ---


@case(0)
def a_byte_order_mark(run):
    run.toml.write_bytes(b"\xef\xbb\xbf" + run.toml.read_bytes())


@case(REFUSED, "run.toml")
def a_configuration_cut_in_half(run):
    run.toml.write_bytes(run.toml.read_bytes()[:-9])


@case(REFUSED, "run.toml")
def a_configuration_that_is_no_text(run):
    run.toml.write_bytes(bytes(range(256)))


@case(REFUSED, "run.toml")
def no_configuration(run):
    run.toml.unlink()


@case(REFUSED, "run.toml")
def a_folder_for_a_configuration(run):
    run.toml.unlink()
    run.toml.mkdir()


@case(REFUSED, "training")
def a_section_twice(run):
    run.toml.write_text(run.toml.read_text() + "[training]\nsteps = 9\n")


# --- texts ---


@case(FAILED, "7.txt")
def a_text_that_has_changed(run):
    (run.folder / "text" / "7.txt").write_text("another text")


@case(FAILED, 'titan_gdn: text_files: .*"new.txt" is new')
def a_text_that_is_new(run):
    (run.folder / "text" / "new.txt").write_text("another text")


@case(FAILED, 'titan_gdn: text_files: .*"7.txt" is missing')
def a_text_that_is_gone(run):
    (run.folder / "text" / "7.txt").unlink()


key(
    "another_data_set",
    REFUSED,
    r'dataset = "c4": .*step-4" was saved by a run of another',
    "--dataloader.dataset",
    "c4",
)


@case(REFUSED, "no text file")
def texts_that_are_all_empty(run):
    run.fresh()
    for file in (run.folder / "text").iterdir():
        file.write_bytes(b"")


@case(FAILED, "noise.txt")
def a_text_of_invalid_bytes(run):
    run.fresh()
    (run.folder / "text" / "noise.txt").write_bytes(random.Random(0).randbytes(5000).replace(b"\0", b"\1"))


@case(FAILED, "titan_gdn: text_files: .*noise.txt")
def a_text_of_invalid_bytes_in_a_data_worker(run):
    a_text_of_invalid_bytes(run)
    run.set("--dataloader.num_workers", "1")


@case(FAILED, "22 rows of 64 tokens .* less than one batch of 999")
def texts_shorter_than_a_batch(run):
    run.fresh()
    run.set("--training.local_batch_size", "999", "--dataloader.no-infinite")


def validates(run, text):
    (run.folder / "held").mkdir()
    for i in range(3):
        (run.folder / "held" / f"{i}.txt").write_text(text)
    run.set("--validator.enable", "--validator.freq", "1", "--validator.steps", "-1")
    run.set("--validator.dataloader.dataset_path", str(run.folder / "held"))
    run.set("--parallelism.context_parallel_degree", "1")  # two data-parallel ranks


@case(0, "validate step: *6")
def a_validation_that_reads_its_data_once(run):
    validates(run, "words " * 301)


@case(FAILED, "rows of 64 tokens .* less than one batch")
def validation_data_shorter_than_a_batch(run):
    validates(run, "words")


@case(FAILED, r"validation data hold less than one batch.*training\.local_batch_size = 8")
def validation_data_shorter_than_a_batch_of_pipeline_stages(run):
    run.fresh()
    validates(run, "words " * 30)  # 8 rows: enough for the loader, whose batches are microbatches
    (run.folder / "held" / "2.txt").unlink()
    run.set("--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "8")


key(
    "validation_data_that_both_end_and_do_not",
    REFUSED,
    "validator.steps = 10 starts over",
    "--validator.dataloader.no-infinite",
)

# --- the tokenizer ---


def own_tokenizer(run):
    from titan_gdn.assets import BYTE_TOKENIZER

    folder = run.folder / "tokenizer"
    shutil.copytree(BYTE_TOKENIZER, folder)
    run.set("--model.hf_assets_path", str(folder))
    return folder


@case(REFUSED, "tokenizer.json")
def a_tokenizer_cut_in_half(run):
    file = own_tokenizer(run) / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:-100])


@case(REFUSED, "hf_assets_path")
def a_folder_without_a_tokenizer(run):
    for file in own_tokenizer(run).iterdir():
        file.unlink()


@case(FAILED, "text_files: the run was saved with another tokenizer")
def a_tokenizer_that_has_changed(run):
    file = own_tokenizer(run) / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "Lowercase"}}))


# --- saved steps ---


@case(0)
def folders_that_are_almost_steps(run):
    for name in ("step-5.bak", "old-step-99", "step-07"):
        shutil.copytree(run.steps / "step-4", run.steps / name)


@case(REFUSED, ".metadata")
def steps_without_metadata(run):
    for step in (2, 4):
        (run.damage(step) / ".metadata").unlink()


@case(0, "step-4")
def a_newest_step_without_metadata(run):
    (run.damage(4) / ".metadata").unlink()


@case(REFUSED, ".metadata")
def an_empty_metadata(run):
    (run.damage(4) / ".metadata").write_bytes(b"")


@case(REFUSED, ".metadata")
def a_garbled_metadata(run):
    (run.damage(4) / ".metadata").write_bytes(bytes(range(256)))


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@case(REFUSED, "open")
def a_metadata_that_runs_code(run):
    import pickle

    (run.damage(4) / ".metadata").write_bytes(pickle.dumps(Attack(str(run.folder / "attacked"))))


@case(REFUSED, "distcp")
def a_shard_cut_in_half(run):
    file = run.damage(4) / "__1_0.distcp"
    os.truncate(file, file.stat().st_size // 2)


@case(REFUSED, "distcp")
def a_shard_that_is_gone(run):
    (run.damage(4) / "__0_0.distcp").unlink()


@case(FAILED, "distcp")
def a_shard_with_flipped_bytes(run):
    file = run.damage(4) / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    for at in random.Random(0).sample(range(len(content) // 2, len(content)), 400):
        content[at] ^= 0xFF
    file.write_bytes(content)


@case(REFUSED, "initial_load_path")
def a_step_to_start_from_that_is_not_there(run):
    run.fresh()
    run.set("--checkpoint.initial_load_path", "/nowhere")


# --- Hugging Face files ---


def weights(run):
    run.fresh()
    run.set("--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path", str(run.folder / "weights"))
    return run.folder / "weights"


@case(0)
def weights_of_transformers(run):
    weights(run)


@case(REFUSED, "model.safetensors")
def weights_cut_in_half(run):
    file = weights(run) / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)


@case(REFUSED, "weights")
def no_weights(run):
    (weights(run) / "model.safetensors").unlink()


@case(REFUSED, "lm_head")
def weights_without_a_head(run):
    from safetensors.torch import load_file, save_file

    file = weights(run) / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file)


# --- disks and deaths ---


def full_disk():
    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))

    interruption_cases._in_a_save(1, "write_data", 6, fill)


@case(FAILED, "step-6.*(No space left|File too large).*newest .* step-4")
def a_disk_that_fills_in_a_save(run):
    run.prepare = full_disk


def die_in_a_save():
    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    interruption_cases._in_a_save(1, "write_data", 6, die, halfway=True)


@case(-signal.SIGKILL)
def a_rank_that_dies_in_a_save(run):
    run.prepare = die_in_a_save


@case(-signal.SIGKILL)
def a_rank_that_dies_in_a_step(run):
    run.set("--training.steps", "500")
    run.act = endings.after("step: *7", endings.send(signal.SIGKILL, 1))


def break_a_step():
    from torchtitan.trainer import Trainer

    original = Trainer.train_step

    def step(self, *args, **kwargs):
        if os.environ["RANK"] == "1" and self.step == 6:
            raise RuntimeError("the second line is not for the screen\nthis is the second line")
        return original(self, *args, **kwargs)

    Trainer.train_step = step


@case(FAILED, "rank 1: RuntimeError: the second line is not for the screen")
def an_error_of_one_rank(run):
    run.prepare = break_a_step


# --- signals ---


def announce_validation():
    from torchtitan.components.validate import Validator

    original = Validator.validate

    def validate(self, *args, **kwargs):
        print("validation begins", flush=True)
        return original(self, *args, **kwargs)

    Validator.validate = validate


def signaled(name, number, moment, *ranks, words=(), prepare=None):
    def prepared(run):
        run.prepare = prepare
        run.set("--training.steps", "500", *words)
        run.act = endings.after(moment, endings.send(number, *ranks))

    CASES[name] = (prepared, 128 + number, "stopped after step .* To go on: .*titan_gdn.train")


VALIDATION = ["--validator.enable", "--validator.freq", "1", "--validator.steps", "200"]

signaled("ctrl_c_in_a_step", signal.SIGINT, "step: *6")
signaled("sigterm_in_a_step", signal.SIGTERM, "step: *6")
signaled("sigterm_for_one_rank", signal.SIGTERM, "step: *6", 1)
signaled(
    "sigterm_in_a_validation",
    signal.SIGTERM,
    "validation begins",
    words=VALIDATION,
    prepare=announce_validation,
)
signaled("sigterm_in_a_save", signal.SIGTERM, "Saving the checkpoint")
signaled(
    "ctrl_c_in_an_asynchronous_save",
    signal.SIGINT,
    "Staging the checkpoint",
    words=["--checkpoint.async_mode", "async"],
)


# --- what must hold for all of them ---


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run on two ranks that has saved steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    argv = ["--job.config_file", configuration(folder), "--training.steps", "4"]
    ending = endings.run(argv)
    assert ending.codes == [0, 0] and complete_steps(str(folder / "out/checkpoint")) == [2, 4], ending.screen
    hf.model(**DENSE)[0].save_pretrained(folder / "weights")
    return folder


def configuration(folder):
    return hf.toml(
        str(folder),
        hf.overrides(hf._qwen3_next(**DENSE)[0]),
        parallelism={"context_parallel_degree": 2},
        checkpoint={"enable": True, "interval": 2, "keep_latest_k": 0, "last_save_model_only": False},
        training={"steps": 6},
        lr_scheduler={"total_steps": 500},
    )


def content(steps, names):
    """A digest of each file of some steps."""
    return {
        str(file.relative_to(steps)): hashlib.sha256(file.read_bytes()).hexdigest()
        for name in names
        for file in sorted((steps / name).rglob("*"))
        if file.is_file()
    }


def check(name, saved, tmp_path):
    change, code, says = CASES[name]
    shutil.copytree(saved, tmp_path / "run")
    run = Run(tmp_path / "run", ["--job.config_file", configuration(tmp_path / "run")])
    change(run)
    safe = {"step-2", "step-4"} - run.touched
    before = content(run.steps, safe) if run.steps.is_dir() else {}
    ending = endings.run(run.argv, prepare=run.prepare, act=run.act)
    screen = ending.screen
    assert ending.seconds < 60 and not ending.killed, screen
    assert "Traceback" not in screen, screen
    assert ending.code == code, screen
    assert re.search(says, screen), screen
    assert content(run.steps, safe) == before if before else True
    assert not (run.folder / "attacked").exists()
    complete = complete_steps(str(run.steps))
    if code == 0:
        assert "Training completed" in screen and complete[-1] == 6, screen
    elif code > 0:
        told = [line for line in screen.splitlines() if line.startswith("titan_gdn: ")]
        assert told and len(told) == len(set(told)), screen
    if code > 128:  # what was trained so far is saved, and the line names it
        told = int(re.search(r"stopped after step (\d+) of training", screen)[1])
        assert complete[-1] == told > 4, screen
        if run.prepare is announce_validation:  # 200 batches, of which the last ones are not computed
            assert not re.search("validate step: *5", screen), screen
    for step in complete:
        if f"step-{step}" not in run.touched:
            read(run.steps / f"step-{step}")


def read(step):
    from torch.distributed.checkpoint import FileSystemReader

    metadata = FileSystemReader(step).read_metadata().state_dict_metadata
    state = {n: torch.empty(x.size) for n, x in metadata.items() if hasattr(x, "size")}
    dcp.load(state, checkpoint_id=step, no_dist=True)


DRAWN = random.Random(0).sample(sorted(CASES), 6)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DRAWN else pytest.mark.slow) for name in CASES]
)
def test_a_run_with_one_thing_wrong(name, saved, tmp_path):
    check(name, saved, tmp_path)


def test_there_are_sixty_of_them():
    assert len(CASES) >= 60
