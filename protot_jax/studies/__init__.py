"""Commands that measure a trained model: concepts, interventions, robustness, GLUE and others."""
