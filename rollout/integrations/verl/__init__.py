"""`actor_rollout_ref.rollout.name=moebius` for verl 0.9.1. docs/verl.md is the guide.

plugin.py is what verl loads; replica.py starts a server actor (server.py) per replica, which owns a group and its
service; adapter.py runs in each trainer process and sends weights, which transfer.py receives in each rank's process;
agent_loop.py announces steps and reports them in verl's metrics; settings.py checks what the user asked for.
"""
