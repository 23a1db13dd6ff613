"""What this suite's tests of FSDP share beyond the names of upstream's ``common_fsdp``. One noun a module.

``internals``: the parts of FSDP that have private names. ``references``: what FSDP is compared with. ``shards``:
which part of a tensor lies on which rank. ``combinations``: subtests for all parameter sets, or for so many that
every pair of values occurs. ``collectives``: notes of FSDP's collectives. ``compiling``: backends of
``torch.compile``. ``training``: an FSDP2 model beside a plain one. ``optimizers``: steps on local shards. ``meshes``:
device meshes of the ranks. ``seeded``: numbers that follow from a seed. ``sharded_states``: sharded state dicts of
FSDP1, taken, checked and loaded. ``cases``: a test case with as few ranks as will do.
"""
