"""One thread: the suite shares its machine."""

import torch

torch.set_num_threads(1)
