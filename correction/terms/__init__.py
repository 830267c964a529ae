"""What a correction is made of, as functions of tensors: ratios, divergences, weights, rejections, objectives, denominators."""
