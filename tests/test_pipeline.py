"""Pipeline stages: each with its own layers, layout and decays, and together the numbers of one rank."""

import os

import pytest
import torch
from safetensors.torch import load_file

from tests import hf, ranks
from tests.draw import in_sets
from tests.training import assert_same_numbers, train, train_until
from titan_gdn.config.load import ConfigError, load_config

PP, CP, TP = (f"--parallelism.{name}_parallel_degree" for name in ("pipeline", "context", "tensor"))
TWO_STAGES = (PP, "2")
KEY = "--parallelism.pipeline_parallel"
SCHEDULE = f"{KEY}_schedule"
FOUR_STAGES = (*TWO_STAGES, SCHEDULE, "Interleaved1F1B")
GATHER, EXCHANGE, STATE = (("--linear_attention.exchange", e) for e in ("all_gather", "all_to_all", "state"))

# In four stages: the embedding and a layer, two layers, one layer, the head alone.
LAYERS = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
SPARSE = {
    "qwen3_next": {"mlp_only_layers": [0, 2]},
    "kimi_linear": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
}


@pytest.fixture(scope="module", params=SPARSE)
def family(request, tmp_path_factory):
    """A model's weights in a folder, what trains them 3 steps on some ranks, and what one rank had."""
    folder = str(tmp_path_factory.mktemp(request.param))
    model, overrides = hf.model(request.param, **LAYERS | SPARSE[request.param])
    model.save_pretrained(folder)
    path = hf.toml(
        folder,
        overrides,
        model={"name": request.param},
        checkpoint=hf.weights_of(folder),
        # Micro-batches change the order of sums. At a higher rate Adam makes enough of that in three steps
        # for a router to choose another expert.
        optimizer={"lr": 3e-4},
        validator={"enable": True, "freq": 3, "steps": 1},
        **{"validator.dataloader": {"dataset": "text_files", "dataset_path": os.path.join(folder, "text")}},
    )

    def run(world_size, *argv, call=train, more=()):
        return ranks.run(call, world_size, ["--job.config_file", path, *argv], *more, timeout=280)

    one_rank = run(1)[0]
    assert one_rank["gap"] > 1e-6, "a near tie between experts: take another seed"
    return folder, run, one_rank


# Both schedules on each mesh, by one family or the other, and every exchange by both.
MESHES = {
    "cp 2": {
        "qwen3_next": (4, *TWO_STAGES, CP, "2", *GATHER),
        "kimi_linear": (4, *FOUR_STAGES, CP, "2", *EXCHANGE),
    },
    "tp 2": {
        "qwen3_next": (4, *FOUR_STAGES, TP, "2"),
        "kimi_linear": (4, *TWO_STAGES, TP, "2", "--parallelism.spmd_backend", "partial_dtensor"),
    },
    "cp 2, tp 2": {
        "qwen3_next": (8, *TWO_STAGES, CP, "2", TP, "2", *STATE),
        "kimi_linear": (8, *FOUR_STAGES, CP, "2", TP, "2", *GATHER),
    },
}


@pytest.mark.parametrize("mesh", in_sets(MESHES, fast=["cp 2"]))
def test_a_pipeline_trains_and_validates_as_one_rank(family, mesh, request):
    _, run, one_rank = family
    world_size, *argv = MESHES[mesh][request.node.callspec.params["family"]]
    records = run(world_size, *argv)
    assert_same_numbers(records, one_rank)
    for record in records:
        if record["loss"]:
            assert len(record["validation"]) == 2
            assert record["validation"] == pytest.approx(one_rank["validation"], rel=1e-5)


def test_hugging_face_weights_go_into_stages_and_come_back_bit_for_bit(family, tmp_path):
    folder, run, _ = family
    argv = ["--job.dump_folder", str(tmp_path), "--training.steps", "1", "--optimizer.lr", "0.0"]
    argv += ["--checkpoint.no-load_only", "--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf"]
    run(2, *FOUR_STAGES, *argv, "--validator.no-enable")
    exported = {}
    for file in (tmp_path / "checkpoint" / "step-1").glob("*.safetensors"):
        exported |= load_file(file)
    theirs = load_file(os.path.join(folder, "model.safetensors"))
    assert exported.keys() == theirs.keys()
    changed = [name for name in theirs if not torch.equal(exported[name], theirs[name])]
    # No rate: only the biases that balance experts take a step.
    assert all(name.endswith("e_score_correction_bias") for name in changed)


@pytest.mark.slow
def test_a_run_stopped_in_stages_goes_on_in_others_and_on_one_rank(family, tmp_path):
    _, run, one_rank = family
    argv = ["--job.dump_folder", str(tmp_path), "--checkpoint.no-load_only", "--checkpoint.interval", "1"]
    argv += ["--validator.no-enable"]
    losses = run(2, *TWO_STAGES, *argv, call=train_until, more=[1])[-1]
    losses += run(2, *FOUR_STAGES, *argv, call=train_until, more=[2])[-1]
    losses += run(1, *argv)[0]["loss"]
    assert losses == pytest.approx(one_rank["loss"], rel=1e-5)


REFUSED = {
    f"{PP} 8": "8 stages, but the model has only 4 layers: at least 6 are needed",
    f"{PP} 4 {SCHEDULE} LoopedBFS": "8 stages, but the model has only 4 layers",
    f"{PP} 2 {SCHEDULE} Interleaved1F1": 'Did you mean "Interleaved1F1B"',
    f"{PP} 2 {SCHEDULE} ZBVZeroBubble": "lose the gradient of the last norm. Possible: 1F1B, GPipe",
    f"{PP} 2 {SCHEDULE}_csv plan.csv": "not supported: set parallelism.pipeline_parallel_schedule to one of",
    f"{PP} 2 {KEY}_layers_per_stage 2": "makes 3 stages.* takes 2$",
    f"{PP} 2 {KEY}_layers_per_stage 0": "at least 1",
    f"{PP} 2 {KEY}_layers_per_stage 1 {SCHEDULE} GPipe": "makes 6 stages.* takes 2$",
    f"{PP} 2 {KEY}_layers_per_stage 3 {SCHEDULE} LoopedBFS": "a multiple of 2, at least 4",
    f"{PP} 2 {KEY}_first_stage_less_layers 6": "at least 5 are needed",
    f"{PP} 2 {SCHEDULE} LoopedBFS --model.overrides.n_layers 2": "embedding alone .*less_layers = 0",
    f"{PP} 2 {KEY}_last_stage_less_layers -1": "less_layers = -1: expected at least 0",
    f"{PP} 2 {KEY}_microbatch_size 0": "microbatch_size must be greater than 0",
    f"{PP} 2 {KEY}_microbatch_size 3": "local_batch_size .* evenly divisible",
    f"{PP} 2 {KEY}_microbatch_size 4": "4 / 4 = 1 .* at least one for each of its 2 stages",
    f"{PP} 2 --training.local_batch_size 5 {SCHEDULE} Interleaved1F1B": "of its 2 rounds, such as 4",
    f"{PP} 2 --model.overrides.tie_word_embeddings": "tie_word_embeddings makes them one weight",
    f"{PP} 2 --training.no-disable_cuda_graphs": "Set --training.disable_cuda_graphs",
    f"{PP} 2 --comm.mode fake_backend": "in a dry run .* set it to 1",
    f"{PP} 3": "product of WORLD_SIZE = 8, got .* pipeline_parallel_degree = 3",
}
CONFIGS = os.path.join(os.path.dirname(__file__), "..", "train_configs")


@pytest.mark.parametrize("argv", REFUSED)
def test_what_no_pipeline_is_made_of_is_refused_before_the_run(argv, monkeypatch):
    monkeypatch.setenv("NGPU", "8")
    path = os.path.join(CONFIGS, "qwen3_next_debug.toml")
    with pytest.raises(ConfigError, match=REFUSED[argv]):
        load_config(["--job.config_file", path, *argv.split()], 8)


@pytest.mark.parametrize(
    "parts",
    [
        '[["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "norm", "lm_head"]]',
        '[["tok_embeddings", "layers.1", "layers.0"], ["layers.2", "layers.3", "norm", "lm_head"]]',
        '[["tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3", "norm"], ["lm_head"]]',
        '[["tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "lm_head"], []]',
    ],
)
def test_stages_given_by_hand_are_the_model_in_order(parts, tmp_path):
    with open(os.path.join(CONFIGS, "qwen3_next_debug.toml")) as file:
        content = file.read()
    assert "[parallelism]" not in content
    path = tmp_path / "run.toml"

    def load(parts):
        path.write_text(f"{content}\n[parallelism]\nmodule_fqns_per_model_part = {parts}\n")
        return load_config(["--job.config_file", str(path), PP, "2"], 2)

    with pytest.raises(ConfigError, match="'layers.0' to 'layers.3', 'norm' and 'lm_head' once each"):
        load(parts)
    with pytest.raises(ConfigError, match="module_fqns_per_model_part with 1 parts.* takes 2$"):
        load('[["tok_embeddings"]]')
    with pytest.raises(ConfigError, match="add a layer to the first part"):
        load('[["tok_embeddings"], ["layers.0", "layers.1", "layers.2", "layers.3", "norm", "lm_head"]]')
    load('[["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "layers.3", "norm", "lm_head"]]')
