"""``python -m torch_fsdp_tests.check``: does FSDP train a user's model as the plain model is trained?

``factory``: what the arguments name. ``checking``: runs the tests of a model. ``check_report``: text, JSON and HTML.
"""
