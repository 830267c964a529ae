"""Settings of one SGLang engine: its arguments, what has to be installed for it, how it is divided over ranks."""
