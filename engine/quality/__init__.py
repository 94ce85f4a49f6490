"""What the formats of weights and KV cost a model in quality: measured, reported, and judged before it is served."""
