"""What became of the sections and keys of TorchTitan 0.1 and 0.2, whose configurations were TOML files."""

_FAULTS = "TorchTitan 0.3 keeps fault tolerance in its torchft experiment; it is not supported here"
_QUANTIZE = 'it is [quantize.linear] and [quantize.experts] now, as in name = "float8"'
_PYTHON = "a file names no Python modules any more; the model is [model] name and flavor"

WHAT_BECAME_OF: dict[str, str] = {
    # Sections, with every key in them.
    "experimental": _PYTHON,
    "fault_tolerance": _FAULTS,
    "float8": _QUANTIZE,
    "memory_estimation": 'TorchTitan 0.3 has none; [comm] mode = "fake_backend" makes a dry run',
    "mx": _QUANTIZE,
    "validation": (
        "it is [validator] now, its data set [validator.dataloader] dataset and dataset_path; "
        "batch size and sequence length are those of [training]"
    ),
    # Keys.
    "activation_checkpoint.early_stop": "TorchTitan 0.3 never stops a recomputation early; remove it",
    "activation_checkpoint.memory_budget": 'it needs mode = "memory_budget" beside it now',
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
        'it is force_recompute_mm_shapes_by_fqns now, with mode = "selective"'
    ),
    "activation_checkpoint.selective_ac_option": (
        'mode = "selective" always chooses by operation now, as "op" did; choosing every n-th layer is gone'
    ),
    "activation_checkpoint.visualize_memory_budget_pareto": 'it needs mode = "memory_budget" beside it now',
    "checkpoint.enable_checkpoint": "it is [checkpoint] enable now",
    "checkpoint.enable_ft_dataloader_checkpoints": _FAULTS,
    "checkpoint.initial_load_model_weights_only": "it is [checkpoint] initial_load_model_only now",
    "checkpoint.interval_type": "the interval is always in steps now; remove it",
    "checkpoint.last_save_model_weights_only": "it is [checkpoint] last_save_model_only now",
    "checkpoint.model_weights_only": "it is [checkpoint] last_save_model_only now",
    "job.config_file": "only the command line names the file: --job.config_file FILE.toml",
    "job.custom_config_module": _PYTHON,
    "job.print_args": "it is [debug] print_config now",
    "job.print_config": "it is [debug] print_config now",
    "job.save_config_file": "it is [debug] save_config_file now",
    "job.use_for_integration_test": "TorchTitan has dropped it; remove it",
    "linear_attention.lower_bound": "it is [model.overrides] lower_bound of kimi_linear now",
    "lr_scheduler.lr_min": "it is [lr_scheduler] min_lr_factor now",
    "metrics.rank_0_only": "it is [metrics] save_for_all_ranks now, which says the opposite",
    "model.converters": _QUANTIZE,
    "model.print_after_conversion": "TorchTitan 0.3 has no converters that run on a built model; remove it",
    "model.tokenizer_path": "it is [model] hf_assets_path now, the folder that holds tokenizer.json",
    "optimizer.beta1": "it is the first of [optimizer] betas now, as in betas = [0.9, 0.95]",
    "optimizer.beta2": "it is the second of [optimizer] betas now, as in betas = [0.9, 0.95]",
    "optimizer.early_step_in_backward": "TorchTitan 0.3 steps after the backward only; remove it",
    "parallelism.context_parallel_rotate_method": "TorchTitan 0.3 always gathers keys and values; remove it",
    "parallelism.disable_loss_parallel": "TorchTitan 0.3 has no such switch; remove it",
    "parallelism.enable_async_tensor_parallel": "it is [compile] enable_async_tensor_parallel now",
    "parallelism.enable_compiled_autograd": "TorchTitan 0.3 has no such switch; remove it",
    "parallelism.expert_parallel_comm_backend": "TorchTitan 0.3 sets it in the model's Python config",
    "parallelism.expert_tensor_parallel_degree": "TorchTitan 0.3 never shards a single expert; remove it",
    "parallelism.pipeline_parallel_expert_parallel_overlap": "TorchTitan 0.3 has no such switch; remove it",
    "parallelism.pipeline_parallel_split_points": "it is [parallelism] module_fqns_per_model_part now",
    "quantize.grouped_mm": _QUANTIZE,
    "training.batch_size": "it is [training] local_batch_size now",
    "training.compile": "it is [compile] enable now",
    "training.dataloader": "its keys stand in [dataloader] now",
    "training.dataset": "it is [dataloader] dataset now",
    "training.dataset_path": "it is [dataloader] dataset_path now",
    "training.deterministic": "it is [debug] deterministic now",
    "training.seed": "it is [debug] seed now",
    "training.warmup_steps": "it is [lr_scheduler] warmup_steps now",
}
"""`section` or `section.key` to a sentence that says where it went; names that are still valid have none."""
