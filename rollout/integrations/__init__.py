"""Trainers that take their rollouts from a switch group. Each folder needs its trainer installed, and no other does."""
