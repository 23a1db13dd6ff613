"""The one engine that starts, watches and ends processes, and how processes talk.

Nothing here knows what a test is, and nothing imports torch.
"""
