"""What both engines share: operators that give one result in both, what they agree on, and weights on their way from one to the other.

`operators`: what SGLang and Megatron compute with when they are batch-invariant. `contract`: the settings of both for equal bits, and what
is refused. `processor`: whether two processes compute alike. `agreement`, `capture`: sampled against trained, by logprob and by operator.
`weight_spec`, `weight_bucket`, `checksum`, `float8`, `float8_format`: what a weight is, what carries it, whether it arrived, in a byte an
entry. `expert_count`: whether a model has experts. `device_choice`, `gpu_share`: what `auto` means, and how both divide one GPU.
`rendezvous`: where ranks find each other.
`matrix_products`: the faster library for them on a CPU. `host_memory`, `quick_imports`, `torch_build`, `environment`: memory that the heap
gives back, imports that take less time, what torch was built for without importing it, and variables for what is started.
Nothing of the mathematics in `correction` imports from here.
"""
