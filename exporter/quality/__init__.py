"""How far a bundle's predictions are from its checkpoint's: perplexity, divergence, agreement."""
