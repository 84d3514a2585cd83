"""What a trainer touches: `RolloutGroup` and its types. Importing it does not import vLLM."""
