"""What this suite's tests of FSDP share beyond the names of upstream's ``common_fsdp``. One noun a module.

``internals``: the parts of FSDP that have private names. ``references``: what FSDP is compared with. ``shards``: which
part of a tensor lies on which rank. ``combinations``: parameter sets in which every pair of values occurs.
``optimizers``: steps on local shards. ``sharded_states``: sharded state dicts of FSDP1, taken, checked and loaded.
``traffic``: the collectives that FSDP calls. ``cases``: a test case with as few ranks as will do.
"""
