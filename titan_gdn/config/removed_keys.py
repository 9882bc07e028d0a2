"""What became of sections and keys of TorchTitan 0.1 and 0.2, which read TOML files, and of our own."""

_FAULTS = "TorchTitan 0.3 has fault tolerance only in its torchft experiment; it is not supported here"
_QUANTIZE = 'it is [quantize.linear] and [quantize.experts] now, as in name = "float8"'
_PYTHON = "a file no longer names Python modules; the model is chosen by model.name and model.flavor"

WHAT_BECAME_OF: dict[str, str] = {
    # Sections, with every key in them.
    "experimental": _PYTHON,
    "fault_tolerance": _FAULTS,
    "float8": _QUANTIZE,
    "memory_estimation": 'TorchTitan 0.3 has none; comm.mode = "fake_backend" makes a dry run',
    "mx": _QUANTIZE,
    "validation": (
        "it is [validator] now, with the data set in validator.dataloader.dataset and dataset_path; "
        "batch size and sequence length are those of [training]"
    ),
    # Keys of TorchTitan.
    "activation_checkpoint.early_stop": "TorchTitan 0.3 never stops a recomputation early; remove it",
    "activation_checkpoint.memory_budget": 'it needs activation_checkpoint.mode = "memory_budget" now',
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
        "it is activation_checkpoint.force_recompute_mm_shapes_by_fqns now, with "
        'activation_checkpoint.mode = "selective"'
    ),
    "activation_checkpoint.selective_ac_option": (
        'activation_checkpoint.mode = "selective" always selects by operator now, as "op" did; selecting '
        "every n-th layer was removed"
    ),
    "activation_checkpoint.visualize_memory_budget_pareto": (
        'it needs activation_checkpoint.mode = "memory_budget" now'
    ),
    "checkpoint.enable_checkpoint": "it is checkpoint.enable now",
    "checkpoint.enable_ft_dataloader_checkpoints": _FAULTS,
    "checkpoint.initial_load_model_weights_only": "it is checkpoint.initial_load_model_only now",
    "checkpoint.interval_type": "the interval is always in steps now; remove it",
    "checkpoint.last_save_model_weights_only": "it is checkpoint.last_save_model_only now",
    "checkpoint.model_weights_only": "it is checkpoint.last_save_model_only now",
    "job.config_file": "only the command line names the file: --job.config_file FILE.toml",
    "job.custom_config_module": _PYTHON,
    "job.print_args": "it is debug.print_config now",
    "job.print_config": "it is debug.print_config now",
    "job.save_config_file": "it is debug.save_config_file now",
    "job.use_for_integration_test": "TorchTitan 0.3 no longer has it; remove it",
    "lr_scheduler.lr_min": "it is lr_scheduler.min_lr_factor now",
    "metrics.rank_0_only": "it is metrics.save_for_all_ranks now, with the opposite meaning",
    "model.converters": _QUANTIZE,
    "model.print_after_conversion": "TorchTitan 0.3 has no converters that run on a built model; remove it",
    "model.tokenizer_path": "it is model.hf_assets_path now, the folder that holds tokenizer.json",
    "optimizer.beta1": "it is the first of optimizer.betas now, as in betas = [0.9, 0.95]",
    "optimizer.beta2": "it is the second of optimizer.betas now, as in betas = [0.9, 0.95]",
    "optimizer.early_step_in_backward": "TorchTitan 0.3 steps only after the backward; remove it",
    "parallelism.context_parallel_rotate_method": "TorchTitan 0.3 always gathers keys and values; remove it",
    "parallelism.disable_loss_parallel": "TorchTitan 0.3 has no such switch; remove it",
    "parallelism.enable_async_tensor_parallel": "it is compile.enable_async_tensor_parallel now",
    "parallelism.enable_compiled_autograd": "TorchTitan 0.3 has no such switch; remove it",
    "parallelism.expert_parallel_comm_backend": (
        "TorchTitan 0.3 sets it in the model's Python configuration; remove it"
    ),
    "parallelism.expert_tensor_parallel_degree": (
        "TorchTitan 0.3 has no degree of its own for the tensors of an expert; remove it"
    ),
    "parallelism.pipeline_parallel_expert_parallel_overlap": "TorchTitan 0.3 has no such switch; remove it",
    "parallelism.pipeline_parallel_split_points": "it is parallelism.module_fqns_per_model_part now",
    "quantize.grouped_mm": _QUANTIZE,
    "training.batch_size": "it is training.local_batch_size now",
    "training.compile": "it is compile.enable now",
    "training.dataloader": "its keys are in [dataloader] now",
    "training.dataset": "it is dataloader.dataset now",
    "training.dataset_path": "it is dataloader.dataset_path now",
    "training.deterministic": "it is debug.deterministic now",
    "training.seed": "it is debug.seed now",
    "training.warmup_steps": "it is lr_scheduler.warmup_steps now",
    # Keys of ours.
    "linear_attention.lower_bound": (
        "it is model.overrides.lower_bound of kimi_linear now, because it is part of the model's architecture"
    ),
    "model.overrides.compressed_dim": "it is model.overrides.kv_lora_rank of kimi_linear now",
    "model.overrides.shared_key_dim": "it is model.overrides.qk_rope_head_dim of kimi_linear now",
}
"""What to tell the user, by `section` or `section.key`; holds no name that is still valid."""
