"""The modified vLLM MoE engine: two runtimes (EP and TP) over one memory. Never imports `moebius.rollout`."""
