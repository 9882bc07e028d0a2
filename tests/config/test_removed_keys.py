"""Keys of TorchTitan 0.2, and of ours, that are gone: the message says what became of them."""

from tests.config.cases import MODEL, named
from titan_gdn.config.fields import fields_of
from titan_gdn.config.load import OWN_SECTIONS
from titan_gdn.config.removed_keys import WHAT_BECAME_OF
from titan_gdn.config.sections import SECTIONS
from titan_gdn.layers.linear_attention import LinearAttentionConfig
from titan_gdn.models.kimi_linear.model import KimiLinearArguments

GONE = {  # by section: all keys of TorchTitan 0.2.2 that 0.3 lacks; "any" where the section itself is gone
    "job": "print_config save_config_file custom_config_module",
    "model": "tokenizer_path converters print_after_conversion",
    "optimizer": "beta1 beta2 early_step_in_backward",
    "training": "dataset dataset_path dataloader",
    "parallelism": (
        "disable_loss_parallel enable_async_tensor_parallel pipeline_parallel_expert_parallel_overlap "
        "context_parallel_rotate_method expert_tensor_parallel_degree expert_parallel_comm_backend"
    ),
    "checkpoint": "enable_ft_dataloader_checkpoints",
    "quantize": "grouped_mm",
    "activation_checkpoint": (
        "selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns early_stop "
        "memory_budget visualize_memory_budget_pareto"
    ),
    **dict.fromkeys(["memory_estimation", "fault_tolerance", "experimental", "validation"], "any"),
}


@named("section, key", {f"{s}.{key}": (s, key) for s in GONE for key in GONE[s].split()})
def test_a_key_of_torchtitan_0_2_says_what_became_of_it(error, section, key):
    news = WHAT_BECAME_OF.get(f"{section}.{key}") or WHAT_BECAME_OF[section]
    text = f"{MODEL}{key} = 1" if section == "model" else f"[{section}]\n{key} = 1"
    assert news in error(text)
    assert news in error("", f"--{section}.{key}", "1")


def test_the_table_holds_no_key_that_is_still_valid(load):
    config = load()
    for name in WHAT_BECAME_OF:
        *sections, key = name.split(".")
        if not sections:
            assert key not in (*SECTIONS, *OWN_SECTIONS)
        elif sections == ["model", "overrides"]:
            assert key not in fields_of(KimiLinearArguments)
        elif sections == ["linear_attention"]:
            assert key not in fields_of(LinearAttentionConfig)
        else:
            assert sections[0] in (*SECTIONS, *OWN_SECTIONS)
            assert not hasattr(getattr(config, sections[0], None), key)


def test_some_messages_word_for_word(error):
    assert "it is dataloader.dataset now" in error('[training]\ndataset = "c4"')
    assert "betas = [0.9, 0.95]" in error("[optimizer]\nbeta1 = 0.9")
    assert "it is [validator] now" in error("[validation]\nsteps = 3")
    assert "it is debug.seed now" in error("[training]\nseed = 3")
    assert "checkpoint.enable now" in error("[checkpoint]\nenable_checkpoint = true")
    assert "[quantize.linear]: name is missing" in error("[quantize.linear.float8]\nemulate = true")


@named(
    "text, news",
    {
        "compressed_dim": (
            f"{MODEL}[model.overrides]\ncompressed_dim = 8",
            "model.overrides.compressed_dim = 8: it is model.overrides.kv_lora_rank of kimi_linear now",
        ),
        "shared_key_dim": (
            f"{MODEL}[model.overrides]\nshared_key_dim = 8",
            "model.overrides.shared_key_dim = 8: it is model.overrides.qk_rope_head_dim of kimi_linear now",
        ),
    },
)
def test_a_key_that_this_project_renamed_says_its_new_name(error, text, news):
    assert news in error(text)


def test_the_lower_bound_is_an_override_of_the_model(error):
    message = error("[linear_attention]\nlower_bound = -5")
    news = "it is model.overrides.lower_bound of kimi_linear now"
    assert f"linear_attention.lower_bound = -5: {news}" in message
