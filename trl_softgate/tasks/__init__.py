"""Problems to train and to evaluate on.

`loading` reads the data sets of the recipes, which `known` lists, and binds their rewards. `addition` is a task of its
own, generated on the spot (problems, verifier, tokenizer, evaluation), `cold_start` the small models that start from
it: a student that barely knows the task and a teacher that does.
"""
