"""Training: data, prompts, collators, trainers, recipes and the train command."""
