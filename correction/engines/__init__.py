"""What both engines share: the operators that give one result in both, and what they agree on before weights go from one to the other.

`operators`: what SGLang and Megatron compute with when they are batch-invariant. `contract`: the settings of both for equal bits, and what
is refused. `processor`: whether two processes compute alike. `agreement`, `capture`: sampled against trained, by logprob and by operator.
`weight_spec`, `checksum`: what a weight is, and whether it arrived. `matrix_products`: the faster library for them on a CPU.
`quick_imports`: what imports need not take. Nothing of the mathematics in `correction` imports from here.
"""
