"""OpenRLHF 0.11.2: its rollout actor over a switch group, and its command line with ours beside it.

docs/openrlhf.md. Import the modules you need: most of them need OpenRLHF, and this file does not.
"""
