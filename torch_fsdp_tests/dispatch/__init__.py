"""Discover, select, plan, lend devices, run files, record, report: what ``run_test.py`` hands over to.

Standard library only. Test files are known by their paths and their event streams; nothing here imports torch.
"""
