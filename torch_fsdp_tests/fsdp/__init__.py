"""What this suite's FSDP tests share beyond upstream's ``common_fsdp``.

``internals``: the parts of FSDP that have private names. ``references``: what FSDP is compared with. ``shards``: which
part of a tensor is on which rank. ``combinations``: subtests for all parameter sets, or for enough of them that every
pair of values occurs. ``collectives``: records FSDP's collectives. ``compiling``: backends of ``torch.compile``.
``training``: an FSDP2 model beside a plain one. ``optimizers``: steps on local shards. ``meshes``: device meshes of the
ranks. ``seeded``: random numbers from a seed. ``sharded_states``: sharded state dicts of FSDP1, taken, checked and
loaded. ``cases``: a test case with as few ranks as possible.
"""
