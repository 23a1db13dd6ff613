"""Processes and how they talk: what a host can say about them, typed messages, fork servers, peers, and launchers.

Nothing here knows what a test is, and nothing imports torch.
"""
