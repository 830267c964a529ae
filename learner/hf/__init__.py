"""Hugging Face model folders: what is read and written, which can be trained, and a small one from nothing."""
