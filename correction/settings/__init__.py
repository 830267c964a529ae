"""What a correction can be told: words, parts, and when each part runs. Without torch."""
