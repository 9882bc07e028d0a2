"""Runs that the real torchrun starts: what a terminal shows when they end, and what is left of them.

`tests/endings.py` does what torchrun does, in seconds. Here torchrun itself forwards the signals, to data
workers, too, prints its own report, and is killed. Each run imports everything again and takes half a minute.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from titan_gdn.checkpoint.steps import complete_steps

ROOT = Path(__file__).parent.parent
CONFIG = ["--job.config_file", str(ROOT / "train_configs" / "qwen3_next_debug.toml")]
SMALL = ["--training.local_batch_size", "1", "--training.seq_len", "128", "--metrics.log_freq", "1"]
SAVES = ["--checkpoint.enable", "--checkpoint.interval", "1000", "--checkpoint.no-last_save_model_only"]

pytestmark = pytest.mark.slow


class Torchrun:
    """A run on two ranks.

    Args:
        folder: Where the run writes.
        argv: The command line of `module`.
        module: What torchrun starts.
    """

    def __init__(self, folder, *argv, module="titan_gdn.train"):
        self.path, self.folder = folder / "screen", str(folder / "out")
        words = ["--nproc-per-node", "2", "-m", module, *argv, "--job.dump_folder", self.folder]
        path = f"{ROOT}{os.pathsep}{folder}"
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        with open(self.path, "w") as screen:
            self.launcher = subprocess.Popen(
                [Path(sys.executable).with_name("torchrun"), *words],
                cwd=folder,
                env=environment,
                stdout=screen,
                stderr=screen,
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launcher.wait()

    @property
    def screen(self):
        return re.sub(r"\x1b\[[0-9;]*m", "", self.path.read_text(errors="replace"))

    def processes(self):
        """The launcher, the ranks and their data workers: those that name the run's folder."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if self.folder in (entry / "cmdline").read_text().split("\0"):
                    found.append(int(entry.name))
        return found

    def wait_for(self, pattern):
        end = time.monotonic() + 120
        while not re.search(pattern, self.screen):
            assert time.monotonic() < end and self.launcher.poll() is None, self.screen
            time.sleep(0.02)

    def ends_within(self, seconds):
        end = time.monotonic() + seconds
        while self.processes():
            assert time.monotonic() < end, f"left: {self.processes()}\n{self.screen}"
            self.launcher.poll()
            time.sleep(0.1)
        return self.launcher.wait()

    def only_line(self):
        """Our line. Nothing but torchrun's own report may follow it."""
        lines = self.screen.splitlines()
        ours = [number for number, line in enumerate(lines) if line.startswith("titan_gdn: ")]
        assert len(ours) == 1, self.screen
        before = "\n".join(lines[: ours[0]])
        assert (
            "Traceback" not in before and "[rank" not in self.screen and "terminate called" not in self.screen
        )
        assert self.screen.count("Traceback (most recent call last)") <= 1, self.screen  # torchrun's
        return lines[ours[0]]


def test_a_signal_to_all_processes_saves_the_step_and_the_command_that_is_printed_goes_on(tmp_path):
    """A scheduler signals torchrun, the ranks and their data workers, and torchrun signals them again."""
    argv = [*CONFIG, *SMALL, *SAVES, "--dataloader.num_workers", "1", "--training.steps", "6"]
    with Torchrun(tmp_path, *argv) as run:
        run.wait_for(r"step:\s+1 ")
        for pid in run.processes():
            os.kill(pid, signal.SIGTERM)
        assert run.ends_within(60) != 0
        line = run.only_line()
    step = int(re.search(r"SIGTERM: stopped after step (\d+) of training.steps = 6", line)[1])
    assert complete_steps(f"{run.folder}/checkpoint") == [step] and step < 6
    assert (
        line.endswith(f"--job.dump_folder {run.folder}") and "--nproc-per-node 2 -m titan_gdn.train" in line
    )
    with Torchrun(tmp_path, *argv) as run:
        assert run.ends_within(120) == 0, run.screen
    assert f"Training starts at step {step + 1}" in run.screen and "Training completed" in run.screen
    assert complete_steps(f"{run.folder}/checkpoint") == [step, 6]


def test_ctrl_c_before_the_first_step_ends_at_once(tmp_path):
    with Torchrun(tmp_path, *CONFIG, *SMALL, *SAVES) as run:
        run.wait_for("Building")
        os.kill(run.launcher.pid, signal.SIGINT)
        assert run.ends_within(20) != 0
        assert run.only_line().startswith("titan_gdn: SIGINT before the first step")
    assert complete_steps(f"{run.folder}/checkpoint") == []


def test_ranks_whose_launcher_is_killed_save_their_step_and_end(tmp_path):
    with Torchrun(tmp_path, *CONFIG, *SMALL, *SAVES, "--training.steps", "500") as run:
        run.wait_for(r"step:\s+2 ")
        run.launcher.kill()
        run.ends_within(60)
        (step,) = complete_steps(f"{run.folder}/checkpoint")
        assert f"SIGTERM: stopped after step {step} of training.steps = 500, which is saved" in run.screen


BROKEN = """
import os
from titan_gdn import train
from titan_gdn.endings import errors

def main():
    from titan_gdn.runtime import cpu
    cpu.enable()
    from torchtitan.trainer import Trainer
    step = Trainer.train_step

    def train_step(self, data):
        if os.environ["RANK"] == "1" and self.step == 2:
            raise RuntimeError("the cause\\nand more")
        return step(self, data)

    Trainer.train_step = train_step
    train.main()

errors.run(main)
"""


def test_an_error_of_one_rank_is_the_first_and_the_last_line(tmp_path):
    """The other rank's connection breaks. torchrun's report ends with our line, too."""
    (tmp_path / "broken.py").write_text(BROKEN)
    with Torchrun(tmp_path, *CONFIG, *SMALL, module="broken") as run:
        assert run.ends_within(120) == 1
        line = run.only_line()
    path = f"{run.folder}/errors/rank_1.txt"
    assert line.startswith(f"titan_gdn: rank 1: RuntimeError: the cause (traceback: {path};")
    assert "and more" in open(path).read() and "train_step" in open(path).read()
    *_, last, border = run.screen.splitlines()
    assert last.strip() == f"traceback : {line}" and set(border) == {"="}


def test_a_wrong_key_is_the_first_and_the_last_line(tmp_path):
    with Torchrun(tmp_path, *CONFIG, "--training.stepss", "3") as run:
        assert run.ends_within(120) == 1  # torchrun's own code; the ranks end with 2
        line = run.only_line()
    assert run.screen.splitlines()[0] == line and 'unknown key "stepss"' in line
    assert run.screen.splitlines()[-2].strip() == f"traceback : {line}"
    assert "exitcode  : 2" in run.screen


def full(tmp_path):
    """A file system of 24 MiB in memory; skips where one cannot be mounted."""
    folder = tmp_path / "out"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    return folder


def test_a_disk_that_is_full_in_a_save_is_one_line_and_leaves_the_step_before(tmp_path):
    folder = full(tmp_path)
    try:
        saves = ["--checkpoint.enable", "--checkpoint.interval", "1", "--training.steps", "20"]
        with Torchrun(tmp_path, *CONFIG, *SMALL, *saves, "--checkpoint.keep_latest_k", "0") as run:
            assert run.ends_within(120) == 1
            line = run.only_line()
        assert re.search("No space left on device|could not be written to its end", line)
        assert "(0 bytes are free on its disk)" in line
        newest = complete_steps(f"{folder}/checkpoint")[-1]
        assert line.endswith(f"The newest complete one is step-{newest}.")
        subprocess.run(["mount", "-o", "remount,size=200m", folder], check=True)
        steps = ["--checkpoint.enable", "--checkpoint.interval", "100", "--training.steps", str(newest + 1)]
        with Torchrun(tmp_path, *CONFIG, *SMALL, *steps) as run:
            assert run.ends_within(120) == 0, run.screen
        assert f"Training starts at step {newest + 1}" in run.screen
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
