"""A run in simulated time: the real queue and the real dispatch rule; engines and learner take the time that they are said to take."""
