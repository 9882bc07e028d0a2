"""The checkpoint that a run resumes from, and the weights that it starts with."""

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file


def test_missing_weights_are_an_error_before_the_run(error, load, tmp_path):
    text = "[checkpoint]\nenable = true\ninitial_load_in_hf = true\n"
    assert "model.hf_assets_path = " in (message := error(text)) and "*.safetensors" in message
    elsewhere = f'initial_load_path = "{tmp_path}"'
    assert f'checkpoint.initial_load_path = "{tmp_path}"' in error(text + elsewhere)
    (tmp_path / "model.safetensors").touch()
    assert 'model.safetensors" is empty' in error(text + elsewhere)
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert load(text + elsewhere).checkpoint.initial_load_in_hf


def test_a_run_resumes_only_from_a_step_with_its_training_state(error, load, tmp_path):
    text = f'[job]\ndump_folder = "{tmp_path}"\n[checkpoint]\nenable = true\n'
    assert "checkpoint.load_step = 5: no such step was saved" in error(text + "load_step = 5")
    own = tmp_path / "checkpoint"
    dcp.save(
        {"weight": torch.ones(2), "train_state": torch.ones(1)}, checkpoint_id=own / "step-3", no_dist=True
    )
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=own / "step-4", no_dist=True)
    text = f"[training]\nsteps = 9\n{text}"
    (own / "step-9").mkdir()  # interrupted while it was written
    assert 'step-4" holds the model alone (checkpoint.last_save_model_only), from which a run' in error(text)
    assert load(text + "load_step = 3").checkpoint.load_step == 3
    assert "Possible: -1 (the newest), 3, 4." in error(text + "load_step = 9")
    (own / "step-9" / "model.safetensors.index.json").touch()
    assert 'step-9" holds Hugging Face files' in error(text)
    assert load(text + "folder = 'other'").checkpoint.folder == "other"


def test_initial_load_path_is_the_folder_of_a_step(error, load, tmp_path):
    text = f'[job]\ndump_folder = "{tmp_path / "own"}"\n[checkpoint]\nenable = true\n'
    text += f'initial_load_path = "{tmp_path}"\n'
    assert "expected the folder of a step, with .metadata in it" in error(text)
    (tmp_path / ".metadata").touch()
    assert '.metadata" cannot be read' in error(text)
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    assert load(text).checkpoint.initial_load_path == str(tmp_path)
