"""The program behind ``run_test.py``: it selects and plans test files, assigns devices, runs files, and reports.
Standard library only. It knows test files by their paths and their event streams. Nothing here imports torch.
"""
