"""The one room that knows what JAX's jaxprs look like, in any version.

A jaxpr is a list of equations; an equation is a primitive with parameters, and
some parameters hold further jaxprs. JAX changes the names of parameters without
notice. So what is needed is derived from types where that is possible, what is
read by name has a fallback, and what is not understood is ``None``: the caller
then takes the equation as a whole. Nothing here raises because of a new JAX.
``tests/package/test_jax.py`` holds what is relied on, and fails first.
"""
