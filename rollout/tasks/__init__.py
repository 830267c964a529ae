"""Where prompts come from: questions of reasoning-gym or of rows, and their text as token ids."""
