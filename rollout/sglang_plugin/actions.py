"""Actions that the plugin adds to SGLang's request `check_weights`; light to import on both sides."""

SPECS = "evenkeel.specs"
"""Answer: HF name -> "dtype:shape", for example "float32:128,64"."""
CHECKSUMS = "evenkeel.checksums"
"""Answer: HF name -> correction.engines.checksum.tensor_checksum of the tensor that the engine holds."""
PROCESSOR = "evenkeel.processor"
"""Answer: the fields of correction.engines.processor.Processor, of the scheduler process."""
