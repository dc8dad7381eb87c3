"""Is the output the same, how fast is it, does everything work here: check, bench, doctor and their prompts."""
