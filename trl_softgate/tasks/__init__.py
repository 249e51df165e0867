"""Built-in verifiable tasks, generated on the spot: nothing is downloaded.

`addition` holds the task (problems, verifier, tokenizer, evaluation), `cold_start` the small models that start from
it: a student that barely knows the task and a teacher that does.
"""
