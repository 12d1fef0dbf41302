"""The search for training_steps, written at random in plain code, that graphs stand for wrongly."""
