"""The helpers that this suite's FSDP tests share, in addition to upstream's ``common_fsdp``.

What FSDP is compared with: ``references`` has plain models and values, ``shards`` which part of a tensor is on which
rank, ``seeded`` random numbers from a seed. How tests train: ``training`` trains an FSDP2 model and a plain one side by
side, ``optimizers`` steps on local shards, ``meshes`` has the device meshes of the ranks, ``toy_models`` models of
several files. What tests run: ``combinations`` has subtests for all parameter sets, or for enough of them that every
pair of values occurs, ``compiling`` backends of ``torch.compile``, ``launches`` tests that launch ranks several times.
What FSDP does: ``internals`` has the parts with private names, ``collectives`` records collectives, ``custom_comms``
replaces them.

One feature each: ``init_cases`` what ``fully_shard`` creates, ``forward_methods`` methods besides ``forward``,
``mixed_precision`` casts, ``stacks`` and ``expert_parallelism`` models with TP and with experts, ``pipelines`` pipeline
schedules, ``fsdp1_cases`` test cases of FSDP1.

State dicts: ``fsdp1_state_dicts`` has the kinds of FSDP1, ``sharded_states`` and ``dtensor_states`` the sharded ones,
``optim_states`` those of optimizers, ``state_dict_pairs`` pairs of models for ``torch.distributed.checkpoint``.
``checkpoints`` has training that continues in another layout.
"""
