"""Which values of a model go beyond what float16 holds, found by running it in float32."""
