"""The helpers that this suite's FSDP tests share, in addition to upstream's ``common_fsdp``.

``internals``: the parts of FSDP that have private names. ``references``: plain models and values to compare FSDP with.
``shards``: which part of a tensor is on which rank. ``combinations``: subtests for all parameter sets, or for enough of
them that every pair of values occurs. ``collectives``: records FSDP's collectives. ``compiling``: backends of
``torch.compile``. ``training``: trains an FSDP2 model and a plain one side by side. ``optimizers``: steps on local
shards. ``meshes``: device meshes of the ranks. ``seeded``: random numbers from a seed. ``sharded_states``: takes and
loads sharded state dicts of FSDP1. ``checkpoints``: training that continues in another layout. ``launches``: tests that
launch ranks several times. Helpers that only one folder of tests needs lie beside these tests.
"""
