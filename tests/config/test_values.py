"""Values: which source wins, how they are converted, and what is said about a wrong one."""

from tests.config.cases import MODEL, named
from titan_gdn.layers.linear_attention import LinearAttentionConfig

# --- Precedence ---


def test_the_command_line_wins_over_the_file_which_wins_over_the_flavor(load):
    assert load().training.steps == 7
    assert load("[training]\nsteps = 8").training.steps == 8
    assert load("[training]\nsteps = 8", "--training.steps", "9").training.steps == 9
    assert load("", "--training.steps", "9").training.steps == 9


def test_the_later_of_two_options_wins(load):
    assert load("", "--training.steps", "9", "--training.steps=10").training.steps == 10
    assert load("", "--compile.enable", "--compile.no-enable").compile.enable is False
    assert load("", "--compile.no-enable", "--compile.enable").compile.enable is True


def test_a_section_changed_in_file_and_command_line_keeps_both_and_the_defaults(load):
    training = load("[training]\nsteps = 8", "--training.seq_len", "32").training
    assert (training.steps, training.seq_len, training.local_batch_size) == (8, 32, 2)


def test_the_job_and_the_model_fill_the_top_of_the_configuration(load, tmp_path):
    (tmp_path / "tokenizer.json").write_text((tmp_path / "assets" / "tokenizer.json").read_text())
    text = f'[job]\ndump_folder = "there"\ndescription = "why"\n{MODEL}hf_assets_path = "{tmp_path}"'
    config = load(text)
    assert (config.dump_folder, config.hf_assets_path) == ("there", str(tmp_path))
    assert config.model_spec.flavor == "tiny"
    assert load(text, "--model.flavor", "large").model_spec.flavor == "large"


def test_the_model_may_be_set_on_the_command_line_alone(load):
    words = ["--model.name", "fake", "--model.flavor", "large"]
    assert load("# [model]", *words).model_spec.flavor == "large"


def test_the_linear_attention_section_reaches_the_model(load):
    assert load().model_spec.model.linear_attention == LinearAttentionConfig(kernel="auto")
    text = '[linear_attention]\nkernel = "torch"'
    assert load(text).model_spec.model.linear_attention.kernel == "torch"
    assert load(text, "--linear-attention.kernel=fla").model_spec.model.linear_attention.kernel == "fla"


def test_overrides_reach_the_builder_in_the_types_that_it_annotates(load):
    text = MODEL + "[model.overrides]\nn_layers = 4\nrope_factor = 2\nwidths = [1, 2]\nrope_scaling = {a = 1}"
    words = "--model.overrides.n_layers 3 --model.overrides.tied --model.overrides.widths 5 6"
    overrides = load(text, *words.split()).model_spec.model.overrides
    assert overrides == {
        "n_layers": 3,
        "rope_factor": 2.0,
        "widths": (5, 6),
        "rope_scaling": {"a": 1},
        "tied": True,
    }
    assert isinstance(overrides["rope_factor"], float)
    layers = load("", "--model.overrides.layer-types=linear,full").model_spec.model.overrides
    assert layers == {"layer_types": ["linear", "full"]}


# --- Conversion ---


@named(
    "key, value, expected",
    {
        "int": ("training.steps", "3", 3),
        "int as float": ("training.max_norm", "1", 1.0),
        "float": ("training.max_norm", "0.5", 0.5),
        "choice": ("training.dtype", '"bfloat16"', "bfloat16"),
        "int as optional float": ("lr_scheduler.min_lr_factor", "1", 1.0),
        "none as optional float": ("lr_scheduler.decay_ratio", '"none"', None),
        "optional float": ("lr_scheduler.decay_ratio", "0.25", 0.25),
        "none as optional choice": ("parallelism.context_parallel_load_balancer", '"none"', None),
        "nested list": ("parallelism.module_fqns_per_model_part", '[["a", "b"], ["c"]]', [["a", "b"], ["c"]]),
        "empty list": ("compile.components", "[]", []),
        "list of choices": ("compile.components", '["loss"]', ["loss"]),
        "bool": ("compile.enable", "true", True),
        "zero": ("debug.seed", "0", 0),
        "none as a choice": ("activation_checkpoint.determinism_check", '"none"', "none"),
        "negative int": ("validator.steps", "-1", -1),
    },
)
def test_values_of_the_file_are_converted_to_the_types_of_their_fields(load, key, value, expected):
    section, name = key.split(".")
    result = getattr(getattr(load(f"[{section}]\n{name} = {value}"), section), name)
    assert (result, type(result)) == (expected, type(expected))


@named(
    "words, expected",
    {
        "int": ("--training.steps 3", 3),
        "int after =": ("--training.steps=3", 3),
        "float": ("--training.max_norm 1e-1", 0.1),
        "choice": ("--training.dtype bfloat16", "bfloat16"),
        "bool without a word, with dashes": ("--training.gc-debug", True),
        "bool": ("--training.gc_debug true", True),
        "capitalized bool": ("--training.gc_debug=False", False),
        "no- with dashes": ("--training.no-gc-debug", False),
        "no_ with underscores": ("--training.no_gc_debug", False),
        "negative int": ("--validator.steps -1", -1),
        "none as optional float": ("--lr_scheduler.decay_ratio none", None),
        "optional float, with dashes": ("--lr-scheduler.decay-ratio 0.25", 0.25),
        "choice after =, with dashes": ("--lr-scheduler.decay-type=cosine", "cosine"),
        "none as optional choice": ("--parallelism.context_parallel_load_balancer none", None),
        "None as optional choice": ("--parallelism.context_parallel_load_balancer None", None),
        "nested list": ("--parallelism.module_fqns_per_model_part a,b c", [["a", "b"], ["c"]]),
        "list of words": ("--compile.components model loss", ["model", "loss"]),
        "list with commas": ("--compile.components model,loss", ["model", "loss"]),
        "empty list": ("--compile.components=", []),
        "list of one": ("--checkpoint.exclude_from_loading dataloader", ["dataloader"]),
        "str that looks like an option": ("--debug.save_config_file=--odd=name.json", "--odd=name.json"),
        "str with a leading dash": ("--debug.save_config_file -odd", "-odd"),
        "str that looks like an int": ("--debug.save_config_file 3", "3"),
        "none as a choice": ("--activation_checkpoint.determinism_check none", "none"),
    },
)
def test_words_of_the_command_line_are_converted_to_the_types_of_their_fields(load, words, expected):
    section, name = words.split()[0].removeprefix("--").split("=")[0].replace("-", "_").split(".")
    result = getattr(getattr(load("", *words.split()), section), name.removeprefix("no_"))
    assert (result, type(result)) == (expected, type(expected))


# --- Wrong values ---


@named(
    "key, value, expected",
    {
        "str for int": ("training.steps", '"ten"', "int"),
        "float for int": ("training.steps", "1.5", "int"),
        "bool for int": ("training.steps", "true", "int"),
        "list for int": ("training.steps", "[1]", "int"),
        "date for int": ("training.steps", "1979-05-27", "int"),
        "none for int": ("training.steps", '"none"', "int"),
        "str for float": ("training.max_norm", '"1"', "float or int"),
        "bool for float": ("training.max_norm", "true", "float or int"),
        "int for bool": ("training.gc_debug", "1", "bool"),
        "str for bool": ("training.gc_debug", '"true"', "bool"),
        "str for optional int": ("debug.seed", '"x"', 'int or "none"'),
        "int for optional str": ("debug.save_config_file", "3", 'str or "none"'),
        "int for str": ("checkpoint.folder", "3", "str"),
        "str for list": ("compile.components", '"model"', 'list["model" or "loss"]'),
        "int in a list of str": (
            "activation_checkpoint.force_recompute_mm_shapes_by_fqns",
            '["a", 3]',
            "list[str]",
        ),
        "flat for nested list": (
            "parallelism.module_fqns_per_model_part",
            '["a"]',
            'list[list[str]] or "none"',
        ),
        "str for an optimizer's float": ("optimizer.lr", '"fast"', "float"),
        "short tuple": ("optimizer.betas", "[0.9]", "tuple[float, float]"),
        "bool in a tuple": ("optimizer.betas", "[0.9, true]", "tuple[float, float]"),
        "int for an optimizer's bool": ("optimizer.amsgrad", "0", "bool"),
        "int for dict": ("optimizer.optimizer_factory_kwargs_by_name", "3", "dict["),
        "int for choice": ("linear_attention.kernel", "1", '"auto" or "fla" or "torch"'),
        "int for description": ("job.description", "1", "str"),
        "int for folder": ("job.dump_folder", "1", "str"),
    },
)
def test_a_value_of_the_wrong_type_names_key_value_and_type(error, key, value, expected):
    section, name = key.split(".")
    message = error(f"[{section}]\n{name} = {value}")
    assert f"run.toml: {key} = " in message
    assert f": expected {expected}" in message


@named(
    "words, expected",
    {
        "str for int": ("--training.steps ten", "int"),
        "float for int": ("--training.steps 1.5", "int"),
        "two words for int": ("--training.steps 1 2", "int"),
        "no word for int": ("--training.steps", "int"),
        "no- for int": ("--training.no-steps", "int"),
        "str for float": ("--training.max_norm big", "float or int"),
        "int for bool": ("--training.gc_debug 1", "bool"),
        "yes for bool": ("--training.gc_debug yes", "bool"),
        "str for optional int": ("--debug.seed x", 'int or "none"'),
        "no word for str": ("--checkpoint.folder", "str"),
        "two words for str": ("--checkpoint.folder a b", "str"),
        "short tuple": ("--optimizer.betas 0.9", "tuple[float, float]"),
        "str for an optimizer's float": ("--optimizer.lr fast", "float"),
        "str for an override's int": ("--model.overrides.n_layers x", "int"),
        "str in a tuple of any length": ("--model.overrides.widths x", "tuple[int, ...]"),
    },
)
def test_words_of_the_wrong_type_are_repeated_with_the_type(error, words, expected):
    shown = words if "no-" not in words else words.replace("no-", "")
    assert f"command line: {shown}: expected {expected}" in error("", *words.split())


@named(
    "section, key, misspelled, right",
    {
        "dtype": ("training", "dtype", "bfloat61", "bfloat16"),
        "decay": ("lr_scheduler", "decay_type", "cosin", "cosine"),
        "kernel": ("linear_attention", "kernel", "fa", "fla"),
        "load balancer": ("parallelism", "context_parallel_load_balancer", "headtial", "headtail"),
        "checkpointing mode": ("activation_checkpoint", "mode", "selectiv", "selective"),
        "optimizer": ("optimizer", "name", "AdmaW", "AdamW"),
        "implementation": ("optimizer", "implementation", "fuse", "fused"),
        "data set": ("dataloader", "dataset", "text_file", "text_files"),
        "validation data set": ("validator.dataloader", "dataset", "c4_validaton", "c4_validation"),
    },
)
def test_a_misspelled_value_names_the_nearest_and_all_possible_ones(error, section, key, misspelled, right):
    words = f"--{section}.{key} {misspelled}"
    from_file, from_words = error(f'[{section}]\n{key} = "{misspelled}"'), error("", *words.split())
    for message in (from_file, from_words):
        assert f'"{right}"' in message.split("Did you mean")[0]
        assert message.endswith(f'Did you mean "{right}"?')
    assert f'run.toml: {section}.{key} = "{misspelled}": expected ' in from_file
    assert f"command line: {words}: expected " in from_words


@named(
    "text, words, right",
    {
        "part to compile": (
            '[compile]\ncomponents = ["model", "los"]',
            "--compile.components model los",
            "loss",
        ),
        "state to leave out": (
            '[checkpoint]\nexclude_from_loading = ["dataloder"]',
            "--checkpoint.exclude_from_loading dataloder",
            "dataloader",
        ),
        "model": ('[model]\nname = "fakr"\nflavor = "tiny"', "--model.name fakr", "fake"),
        "flavor": ('[model]\nname = "fake"\nflavor = "tinny"', "--model.flavor tinny", "tiny"),
    },
)
def test_a_misspelled_value_in_a_list_or_of_the_model_names_the_nearest(error, text, words, right):
    for message in (error(text), error("", *words.split())):
        assert f'"{right}"' in message.split("Did you mean")[0]
        assert message.endswith(f'Did you mean "{right}"?')
    assert f"command line: {words}: expected " in message


def test_a_table_of_free_keys_is_refused_on_the_command_line(error):
    assert "write it in the file" in error("", "--model.overrides.rope_scaling.factor", "3")
    words = ["--optimizer.optimizer_factory_kwargs_by_name.AdamW.fused", "true"]
    assert "write it in the file" in error("", *words)


@named(
    "value, shown",
    {
        "list": ("[1, 2]", "[1, 2]"),
        "table in a list": ("[1, {b = 2}]", '[1, {"b": 2}]'),
        "letters beyond ASCII": ('"é"', '"é"'),
    },
)
def test_the_message_repeats_a_value_of_the_file(error, value, shown):
    assert f"run.toml: training.steps = {shown}: expected int." in error(f"[training]\nsteps = {value}")


@named(
    "key, value, words",
    {
        "infinite rate": ("optimizer.lr", "inf", "a finite number"),
        "infinite decay": ("optimizer.weight_decay", "inf", "a finite number"),
        "no number": ("training.max_norm", "nan", "a finite number"),
        "minus infinity": ("training.max_norm", "-inf", "a finite number"),
        "beyond float32": ("optimizer.lr", "1e39", "a finite number, at most 3.403e+38"),
        "no number in a tuple": ("optimizer.betas", "[0.9, nan]", "a finite number"),
        "infinite override": ("model.overrides.rope_factor", "inf", "a finite number"),
        "infinite bandwidth": ("linear_attention.machine.inside_bandwidth", "inf", "a finite number"),
        "in a free key": (
            "model.overrides.rope_scaling",
            "{a = {b = [inf]}}",
            "a finite number",
        ),
        "seed": ("debug.seed", str(2**64), "an integer of 64 bits"),
        "length": ("training.seq_len", str(2**70), "an integer of 64 bits"),
        "negative": ("training.steps", str(-(2**70)), "an integer of 64 bits"),
        "in a tuple": ("model.overrides.widths", f"[1, {2**63}]", "an integer of 64 bits"),
        "NUL": ("checkpoint.folder", '"a\\u0000b"', "text without the character NUL"),
        "NUL in a key": ("model.overrides.rope_scaling", '{"\\u0000" = 1}', "text without the character NUL"),
    },
)
def test_a_number_or_text_that_no_run_can_use_names_its_key(error, key, value, words):
    section, _, name = key.rpartition(".")
    head = MODEL if key.startswith("model.") else ""
    message = error(f"{head}[{section}]\n{name} = {value}")
    assert f"run.toml: [{key}]" in message or f"run.toml: {key} = " in message
    assert f": expected {words}" in message
    if value[0] not in '[{"':
        assert f"command line: --{key} {value}: expected {words}" in error("", f"--{key}", value)


def test_gradients_are_not_clipped_at_an_infinite_norm(load):
    assert load("[training]\nmax_norm = inf").training.max_norm == float("inf")
    assert load("", "--training.max_norm", "inf").training.max_norm == float("inf")


def test_a_large_integer_is_a_number_for_a_float(load):
    assert load(f"[optimizer]\neps = {2**62}").optimizer.param_groups[0].optimizer_kwargs["eps"] == 2.0**62
